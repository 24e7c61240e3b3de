"""Put the emulator under torch_npu and vllm-ascend, at the moment each is imported.

Nothing of either is edited: CANN's libraries are found by the loader (LD_LIBRARY_PATH),
operators are registered with PyTorch's dispatcher, and the few Python modules that only
come with CANN or with compiled kernels are given here.
"""

import sys
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook


def install_on_import() -> None:
    """Wait for the modules to emulate under; importing none of them costs nothing."""
    register_post_import_hook(lambda torch_npu: install(), "torch_npu")
    register_post_import_hook(_replace_slot_mapping, "vllm.v1.worker.block_table")
    register_post_import_hook(_read_variables, "vllm_ascend.worker.worker")


def install() -> None:
    """Make this process's NPUs compute. `torch_npu` must have been imported."""
    from ascend.emulator import device, kernels, operators
    from ascend.emulator.graph import install_graphs
    from ascend.emulator.launch_log import export_if_asked

    del kernels  # importing it filled the table of operators
    device.override_aten()
    operators.register_operators()
    install_graphs()
    export_if_asked()
    _give_modules_of_cann()


def _read_variables(worker: Any) -> None:
    # Late, so that they can be set in a process that has imported vLLM already.
    from ascend.emulator.faults import seed_fault
    from ascend.emulator.launch_log import export_if_asked

    seed_fault()
    export_if_asked()


def _give_modules_of_cann() -> None:
    """Modules whose import must work; what is in them needs an NPU.

    ``acl.rt.memcpy`` serves vllm-ascend's sleep mode, ``vllm_ascend_C`` registers the
    compiled operators, which the emulator has registered.
    """
    runtime: Any = ModuleType("acl.rt")
    runtime.memcpy = _refuse_sleep_mode
    acl: Any = ModuleType("acl")
    acl.rt = runtime
    extension = ModuleType("vllm_ascend.vllm_ascend_C")
    for module in (acl, runtime, extension):
        sys.modules[module.__name__] = module


def _refuse_sleep_mode(*args: object) -> None:
    raise NotImplementedError("the emulator has no sleep mode")


def _replace_slot_mapping(block_table: Any) -> None:
    from ascend.emulator.slot_mapping import compute_slot_mapping_kernel

    block_table._compute_slot_mapping_kernel = compute_slot_mapping_kernel
