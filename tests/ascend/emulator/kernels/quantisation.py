"""Quantised operators, of which only the shapes are right.

vllm-ascend traces them when it compiles any model, to register its fusion patterns. No
result of that is read, and no model that is tested here runs them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from ascend.emulator.operators import operator

TRACED = (
    "npu_add_rms_norm_dynamic_quant",
    "npu_add_rms_norm_quant",
    "npu_dequant_swiglu_quant",
    "npu_dynamic_quant",
    "npu_mm_all_reduce_base",
    "npu_quant_matmul",
    "npu_quantize",
)


def _shapes_of(name: str) -> Callable[..., Any]:
    """A kernel that gives what torch_npu's meta function of the operator describes."""

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        with FakeTensorMode() as mode:
            fakes = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, keywords))
            described = getattr(torch.ops.npu, name)(*fakes[0], **fakes[1])
        return tree_map_only(
            torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), described
        )

    return kernel


for _name in TRACED:
    operator(f"npu::{_name}")(_shapes_of(_name))
