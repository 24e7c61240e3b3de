"""SwiGLU, and the matrix product that vllm-ascend warms ATB up with."""

import torch
import torch.nn.functional as F

from ascend.emulator.contracts import check, check_dtype
from ascend.emulator.operators import operator

SWIGLU = "aclnnSwiGlu"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@operator("npu::npu_swiglu")
def swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(gate) · up`` of a tensor that holds gate | up along ``dim``.

    Source: torch_npu's documentation of npu_swiglu. Computed in fp32, rounded once.
    """
    check_dtype(SWIGLU, "self", self, FLOATS)
    width = self.shape[dim]
    check(width % 2 == 0, SWIGLU, f"dimension {dim} is {width}, which is odd")
    gate, up = self.float().chunk(2, dim)
    return (F.silu(gate) * up).to(self.dtype)


@operator("atb::_npu_matmul_add_fp32")
def matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, c: torch.Tensor) -> None:
    """Add ``xᵀ · weight`` to ``c``, which is fp32, in place."""
    check_dtype("LinearOperation", "c", c, (torch.float32,))
    c += x.float().T @ weight.float()
