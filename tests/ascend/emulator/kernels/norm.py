"""RMSNorm, alone and after the addition of a residual."""

import torch

from ascend.emulator.contracts import check, check_same_dtype
from ascend.emulator.operators import operator

RMS_NORM = "aclnnRmsNorm"
ADD_RMS_NORM = "aclnnAddRmsNorm"


@operator("npu::npu_rms_norm")
def rms_norm(
    self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x / sqrt(mean(x²) + eps) · gamma`` over gamma's dimensions, the last ones.

    Source: torch_npu's documentation of npu_rms_norm. Computed in fp32, rounded once.

    Returns:
        The result in x's dtype, and 1/rms in fp32, whose normed dimensions are 1.
    """
    normed = range(-gamma.dim(), 0)
    fits = self.shape[-gamma.dim() :] == gamma.shape
    check(fits, RMS_NORM, f"gamma {list(gamma.shape)} does not end {list(self.shape)}")
    x = self.float()
    rstd = torch.rsqrt(x.square().mean(tuple(normed), keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(self.dtype), rstd


@operator("npu::npu_add_rms_norm")
def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of ``x1 + x2``; also 1/rms and the sum.

    Source: torch_npu's documentation of npu_add_rms_norm. The sum is rounded to the
    inputs' dtype before it is normed, since that is what goes on as the residual.
    """
    check(
        x1.shape == x2.shape,
        ADD_RMS_NORM,
        f"x1 is {list(x1.shape)}, x2 {list(x2.shape)}: they must be alike",
    )
    check_same_dtype(ADD_RMS_NORM, x1=x1, x2=x2)
    total = x1 + x2
    normed, rstd = rms_norm(total, gamma, epsilon)
    return normed, rstd, total


def _shapes(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rstd = x1.new_empty((*x1.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(x1), rstd, torch.empty_like(x1)


@operator(
    "_C_ascend::npu_add_rms_norm_bias",
    schema="(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, "
    "float epsilon=1e-6) -> (Tensor y, Tensor rstd, Tensor x)",
    fake=_shapes,
)
def add_rms_norm_bias(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add_rms_norm`, with a bias added to what is normed.

    Source: csrc/torch_binding.cpp of vllm-ascend.
    """
    normed, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    if beta is not None:
        normed = (normed.float() + beta.float()).to(normed.dtype)
    return normed, rstd, total
