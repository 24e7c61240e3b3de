"""Every kernel that the NPU is asked to run, in order.

Views and allocations are not kernels. A graph's kernels count when it is replayed; as
it is captured they run as well, and count too.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_DIRECTORY = "NPU_EMULATOR_LAUNCH_LOG"


@dataclass(frozen=True)
class Launch:
    """One kernel.

    Attributes:
        name: ``namespace::operator.overload``.
        tensors: dtype and shape of each tensor among its arguments.
    """

    name: str
    tensors: list[tuple[str, list[int]]]


_logs: list[list[Launch]] = []


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """The kernels that are launched in the block, by this process."""
    log: list[Launch] = []
    _open(log)
    try:
        yield log
    finally:
        _logs.remove(log)
        _watch_aten()


def record(name: str, arguments: Any) -> None:
    """Note a kernel of ours; costs nothing while nobody listens."""
    if _logs:
        found = (x for x in tree_leaves(arguments) if torch.is_tensor(x))
        described = [(str(x.dtype).removeprefix("torch."), [*x.shape]) for x in found]
        _note(Launch(name, described))


def export_if_asked() -> None:
    """Write this process's kernels to a file, where the variable names a directory."""
    is_written = any(isinstance(log, _File) for log in _logs)
    if (directory := os.environ.get(_DIRECTORY)) and not is_written:
        Path(directory).mkdir(parents=True, exist_ok=True)
        _open(_File(Path(directory) / f"{os.getpid()}.jsonl"))


class _File(list[Launch]):
    """A log that goes to a file, a JSON object a line."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._stream = path.open("a", buffering=1)

    def append(self, launch: Launch) -> None:
        self._stream.write(json.dumps(asdict(launch)) + "\n")


def _open(log: list[Launch]) -> None:
    _logs.append(log)
    _watch_aten()


def _watch_aten() -> None:
    from ascend.emulator.device import set_launch_hook

    set_launch_hook(_note_aten if _logs else None)


def _note_aten(name: str, tensors: str) -> None:
    described = [(_TORCH_NAMES[dtype], shape) for dtype, shape in json.loads(tensors)]
    _note(Launch(name, described))


def _note(launch: Launch) -> None:
    for log in _logs:
        log.append(launch)


# C++ calls dtypes by other names than Python.
_TORCH_NAMES = {
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Double": "float64",
}
