"""Top-k and top-p filtering of logits."""

import torch

from ascend.emulator.contracts import check_dtype, check_shape
from ascend.emulator.operators import operator

TOP_K_TOP_P = "aclnnApplyTopKTopP"


@operator("npu::npu_top_k_top_p")
def top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None, k: torch.Tensor | None
) -> torch.Tensor:
    """Logits with -inf at all but the k best, and of those the first that make up p.

    Source: ``apply_top_k_top_p_pytorch`` of vLLM's v1/sample/ops/topk_topp_sampler.py.

    Args:
        logits: ``[rows, vocab]``.
        p: ``[rows]``, or None for all of the probability.
        k: ``[rows]``, or None for the whole vocabulary.
    """
    rows, vocab = logits.shape
    ascending, order = logits.float().sort(dim=-1)
    if k is not None:
        check_shape(TOP_K_TOP_P, "k", k, (rows,))
        check_dtype(TOP_K_TOP_P, "k", k, (torch.int32, torch.int64))
        kth_best = ascending.gather(1, (vocab - k.long())[:, None])
        ascending = ascending.masked_fill(ascending < kth_best, -torch.inf)
    if p is not None:
        check_shape(TOP_K_TOP_P, "p", p, (rows,))
        is_in_tail = ascending.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        is_in_tail[:, -1] = False  # the best one stays, whatever p is
        ascending = ascending.masked_fill(is_in_tail, -torch.inf)
    return torch.empty_like(ascending).scatter_(-1, order, ascending).to(logits.dtype)


@operator(
    "_C_ascend::npu_apply_top_k_top_p",
    schema="(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor",
)
def apply_top_k_top_p(
    logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None
) -> torch.Tensor:
    """`top_k_top_p`, as vllm-ascend's extension names it."""
    return top_k_top_p(logits, p, k)
