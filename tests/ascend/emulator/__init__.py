"""An Ascend NPU made of host memory, to run the real torch_npu and vllm-ascend.

``runtime/`` stands in for CANN's libraries: device memory is host memory, streams are
synchronous, collectives go through shared memory. ``device.cpp`` runs aten operators
on that memory with PyTorch's CPU kernels; ``kernels/`` holds the operators that CANN
itself brings, with the contracts that it checks. ``graph.py`` captures and replays
ACL graphs, ``launch_log.py`` records every device kernel. ``build.py`` builds the
libraries, ``install.py`` puts all of it under torch_npu as that is imported.

It shows integration, shapes, memory, order and contracts. It cannot show the
precision, memory formats, races or speed of real kernels.

Environment variables:
    NPU_EMULATOR_LIB: path of the device library; without it nothing is emulated.
    NPU_EMULATOR_DEVICES: how many NPUs there are, 1 by default.
    NPU_EMULATOR_MEMORY: bytes of memory of each, 4 GiB by default.
    NPU_EMULATOR_SOC: name of the chip, Ascend910B1 by default.
    NPU_EMULATOR_FAULT: a mistake to make on purpose, see ``faults.py``.
    NPU_EMULATOR_LAUNCH_LOG: directory for a log of all kernels, one file a process.
"""
