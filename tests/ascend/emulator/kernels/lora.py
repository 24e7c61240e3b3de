"""Low-rank adapters: each token's rows by the matrix of its adapter.

Source: csrc/kernels/{bgmv,sgmv}_{shrink,expand}.cpp of vllm-ascend. ``bgmv`` names an
adapter for each token, ``sgmv`` for each sequence of tokens. A negative index is no
adapter: those tokens' rows stay as they are.
"""

import torch

from ascend.emulator.contracts import check_dtype
from ascend.emulator.operators import operator

_BGMV = "Tensor! x, Tensor! weight, Tensor! indices, Tensor! y"
_SGMV = "Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! y"
_SLICE = "int slice_offset, int slice_size"


@operator("_C_ascend::bgmv_shrink", schema=f"({_BGMV}, float scale) -> ()")
def bgmv_shrink(
    x: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    y: torch.Tensor,
    scale: float,
) -> None:
    """``y = scale · x · Aᵀ``: ``[tokens, in]`` to fp32 ``[tokens, rank]``."""
    check_dtype("bgmv_shrink", "y", y, (torch.float32,))
    for rows, matrix in _by_adapter(weight, indices):
        y[rows] = scale * (x[rows].float() @ matrix.T)


@operator("_C_ascend::bgmv_expand", schema=f"({_BGMV}, {_SLICE}) -> Tensor")
def bgmv_expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    y: torch.Tensor,
    slice_offset: int,
    slice_size: int,
) -> torch.Tensor:
    """Add ``x · Bᵀ`` to a slice of y's columns, in place; returns y."""
    columns = slice(slice_offset, slice_offset + slice_size)
    for rows, matrix in _by_adapter(weight, indices):
        total = y[rows, columns].float() + x[rows].float() @ matrix.T
        y[rows, columns] = total.to(y.dtype)
    return y


@operator("_C_ascend::sgmv_shrink", schema=f"({_SGMV}, float scale) -> ()")
def sgmv_shrink(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    y: torch.Tensor,
    scale: float,
) -> None:
    """`bgmv_shrink` by sequences of ``seq_len`` tokens."""
    bgmv_shrink(x, weight, _of_tokens(lora_indices, seq_len), y, scale)


@operator("_C_ascend::sgmv_expand", schema=f"({_SGMV}, {_SLICE}) -> Tensor")
def sgmv_expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    y: torch.Tensor,
    slice_offset: int,
    slice_size: int,
) -> torch.Tensor:
    """`bgmv_expand` by sequences of ``seq_len`` tokens."""
    indices = _of_tokens(lora_indices, seq_len)
    return bgmv_expand(x, weight, indices, y, slice_offset, slice_size)


def _of_tokens(lora_indices: torch.Tensor, seq_len: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(lora_indices, seq_len.long())


def _by_adapter(
    weight: torch.Tensor, indices: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of each adapter's tokens, and its fp32 matrix ``[out, in]``."""
    matrices = weight.reshape(len(weight), *weight.shape[-2:]).float()
    return [
        ((indices == adapter).nonzero()[:, 0], matrices[adapter])
        for adapter in indices.unique().tolist()
        if adapter >= 0
    ]
