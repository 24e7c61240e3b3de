"""Memory formats: the emulator has one, so that casts between them do nothing.

On an NPU FRACTAL_NZ lays matrices out in tiles. What depends on that is not shown.
"""

import torch

from ascend.emulator.operators import operator

ND = 2  # aclFormat of a plain tensor


@operator("npu::npu_format_cast")
def format_cast(self: torch.Tensor, acl_format: int, **hints: object) -> torch.Tensor:
    """The tensor itself."""
    return self


@operator("npu::npu_format_cast_.acl_format")
def format_cast_(self: torch.Tensor, acl_format: int) -> torch.Tensor:
    """The tensor itself."""
    return self


@operator("npu::get_npu_format")
def get_npu_format(self: torch.Tensor) -> int:
    """Always ND."""
    return ND
