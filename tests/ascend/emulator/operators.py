"""How operators that CANN brings reach PyTorch's dispatcher.

A kernel is a plain function on CPU tensors, collected in a table when its module is
imported; `register_operators` puts each under the NPU's dispatch key.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


class Operator(NamedTuple):
    """A kernel and, where no library defines the operator, its schema and shapes."""

    kernel: Callable[..., Any]
    schema: str | None = None
    fake: Callable[..., Any] | None = None


OPERATORS: dict[str, Operator] = {}

_libraries: list[torch.library.Library] = []  # registrations last as long as these


def operator(
    name: str, *, schema: str | None = None, fake: Callable[..., Any] | None = None
) -> Callable[[Kernel], Kernel]:
    """Make a function the kernel of an operator; the function stays as it is.

    It is called with CPU tensors that share the NPU's memory, and may write into them.
    New tensors that it returns become the NPU's.

    Args:
        name: ``namespace::operator`` or ``namespace::operator.overload``.
        schema: arguments and results, ``(Tensor x) -> Tensor``, for operators that
            only vllm-ascend's compiled extension would define.
        fake: what torch.compile takes the results' shapes from, with such a schema.
    """

    def add(kernel: Kernel) -> Kernel:
        OPERATORS[name] = Operator(kernel, schema, fake)
        return kernel

    return add


def register_operators() -> None:
    """Register every kernel for the NPU; `torch_npu` must have been imported.

    An operator may be called with CPU tensors only, as lists of lengths are: it is
    registered for them too.
    """
    for name, (_, schema, fake) in OPERATORS.items():
        namespace, _, base = name.partition("::")
        if schema is not None:
            definitions = torch.library.Library(namespace, "FRAGMENT")
            definitions.define(base + schema)
            _libraries.append(definitions)
        for key in ("PrivateUse1", "CPU"):
            library = torch.library.Library(namespace, "IMPL", key)
            with warnings.catch_warnings():
                # torch_npu has a kernel of its own, which needs CANN.
                warnings.simplefilter("ignore")
                library.impl(base, _on_device(name), key, allow_override=True)
            _libraries.append(library)
        if fake is not None:
            torch.library.register_fake(name, fake)


def _on_device(name: str) -> Callable[..., Any]:
    """The operator's kernel as the dispatcher calls it: on the NPU's tensors."""
    from ascend.emulator.graph import record_or_run

    run = functools.partial(_run, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        return record_or_run(name, run, arguments, keywords)

    return call


def _run(name: str, arguments: Any, keywords: Any) -> Any:
    from ascend.emulator.device import alias_on_host

    tensors = [x for x in tree_leaves((arguments, keywords)) if torch.is_tensor(x)]
    device = next((x.device for x in tensors if x.device.type != "cpu"), None)
    on_host = {id(tensor): alias_on_host(tensor) for tensor in tensors}

    def see(value: Any) -> Any:
        return on_host[id(value)] if torch.is_tensor(value) else value

    def give_back(value: Any) -> Any:
        if not torch.is_tensor(value) or device is None:
            return value
        for tensor in tensors:
            if on_host[id(tensor)] is value:
                return tensor
        result = torch.empty(value.shape, dtype=value.dtype, device=device)
        alias_on_host(result).copy_(value)
        return result

    arguments, keywords = tree_map(see, (tuple(arguments), keywords))
    return tree_map(give_back, OPERATORS[name].kernel(*arguments, **keywords))
