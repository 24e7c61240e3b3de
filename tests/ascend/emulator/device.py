"""aten on the emulated NPU: the typed side of ``device.cpp``.

Loading this needs the emulator's runtime and torch_npu; `kernels` do not.
"""

import ctypes
import os
from collections.abc import Callable

import torch

# torch_npu's own code for these works on the emulated runtime: they allocate, look at
# storage or make views, which is not computing.
_TORCH_NPU_SERVES = (
    *("_amp", "_copy_from", "_cudnn", "_foreach", "_fused", "_has_compatible"),
    *("_has_same_storage", "_lazy", "_nnpack", "_pin_memory", "_reshape_alias"),
    *("_resize_output", "_sparse", "_to_copy", "as_strided", "empty", "is_pinned"),
    *("is_set_to", "new_empty", "record_stream", "resize", "set_", "sparse", "storage"),
    *("to.", "unfold", "view"),
)
# One of these and the CPU can compute the operator.
_CPU_KERNELS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")

LaunchHook = Callable[[str, str], None]
_HOOK_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)

_library = ctypes.CDLL(os.environ["NPU_EMULATOR_LIB"])
torch.ops.load_library(os.environ["NPU_EMULATOR_LIB"])
for _name, _result, _arguments in (
    ("override", ctypes.c_int, [ctypes.c_char_p]),
    ("set_launch_hook", None, [_HOOK_TYPE]),
    ("tape_new", ctypes.c_void_p, []),
    ("tape_free", None, [ctypes.c_void_p]),
    ("record_on", None, [ctypes.c_void_p]),
    ("tape_length", ctypes.c_long, [ctypes.c_void_p]),
    ("tape_replay", ctypes.c_int, [ctypes.c_void_p, ctypes.c_long, ctypes.c_long]),
):
    _function = getattr(_library, f"npu_emulator_{_name}")
    _function.restype, _function.argtypes = _result, _arguments

_hook: ctypes._CFuncPtr | None = None  # must live while the library may call it


def alias_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of the NPU as a CPU tensor; a CPU tensor as it is."""
    return torch.ops.npu_emulator.alias_on_host(tensor)


def override_aten() -> None:
    """Compute on the CPU every aten operator that torch_npu has a kernel for.

    Operators that return views stay torch_npu's own: they compute nothing.

    Raises:
        RuntimeError: the dispatcher refused one.
    """
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    for full_name in registered:
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or name.startswith(_TORCH_NPU_SERVES):
            continue
        if _returns_a_view(name) or not _cpu_can_compute(full_name):
            continue
        if _library.npu_emulator_override(name.encode()):
            raise RuntimeError(f"the emulator cannot serve {full_name}")


def set_launch_hook(hook: LaunchHook | None) -> None:
    """Tell `hook` of every aten call on the NPU: its name, its tensors as JSON."""
    global _hook

    def forward(name: bytes, tensors: bytes) -> None:
        assert hook is not None
        hook(name.decode(), tensors.decode())

    _hook = _HOOK_TYPE() if hook is None else _HOOK_TYPE(forward)
    _library.npu_emulator_set_launch_hook(_hook)


class Tape:
    """aten calls in order, to be run again on the tensors of their first run."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p(_library.npu_emulator_tape_new())

    def __del__(self) -> None:
        _library.npu_emulator_tape_free(self._handle)

    def __len__(self) -> int:
        return _library.npu_emulator_tape_length(self._handle)

    def replay(self, first: int, last: int) -> None:
        """Run calls ``first`` to ``last - 1``; results go where they went before."""
        if _library.npu_emulator_tape_replay(self._handle, first, last):
            raise RuntimeError(
                "an operator failed in the replay of a graph, see stderr"
            )


def record_on(tape: Tape | None) -> None:
    """Put aten calls on this tape as they run; on none, when it is None."""
    _library.npu_emulator_record_on(None if tape is None else tape._handle)


def _returns_a_view(name: str) -> bool:
    base, _, overload = name.partition(".")
    try:
        schema = torch._C._get_schema(f"aten::{base}", overload)
    except RuntimeError:
        return True  # the dispatcher has it without a schema: leave it alone
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    )


def _cpu_can_compute(full_name: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(
        has_kernel(full_name, key) for key in _CPU_KERNELS
    ) or torch._C._dispatch_has_computed_kernel_for_dispatch_key(full_name, "CPU")
