"""CANN's fused attention in layout TND, paged and not.

vllm-ascend's attention/attention_v1.py calls it for prefill, chunked prefill and
decode, in graphs through its ``out`` form on a workspace that is made once a graph.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ascend.emulator import contracts
from ascend.emulator.contracts import check, check_emulated
from ascend.emulator.kernels.scaled_dot_product import ROWS, attend, gather_paged
from ascend.emulator.operators import operator

FUSED = "aclnnFusedInferAttentionScoreV3"
FLOATS = (torch.float16, torch.bfloat16)


@operator("npu::npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_lse_flag: bool = False,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a batch of sequences whose tokens stand one after another.

    Source: torch_npu's documentation of the operator. Sequences without keys, and rows
    that see no key, come out as zeros: graph mode pads with them.

    Args:
        query: ``[tokens, num_heads, head_size]``, fp16 or bf16.
        key: ``[kv_tokens, kv_heads, head_size]``, or with a ``block_table`` a cache
            ``[blocks, block_size, kv_heads × head_size]``.
        value: as `key`.
        softmax_lse_flag: give the logarithm of each row's sum of exponentials as well.
        **arguments: those of `_fused`.

    Returns:
        The result, as `query`, and ``[tokens, num_heads, 1]`` fp32, inf where no key
        was seen; without the flag a single 0.
    """
    out = torch.empty(query.shape, dtype=query.dtype)
    lse = query.new_zeros(1, dtype=torch.float32)
    if softmax_lse_flag:
        lse = lse.new_empty((*query.shape[:2], 1))
    _fused(query, key, value, out, lse if softmax_lse_flag else None, **arguments)
    return out, lse


@operator("npu::npu_fused_infer_attention_score.out")
def fused_infer_attention_score_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    out: Sequence[torch.Tensor],
    workspace: torch.Tensor | None = None,
    softmax_lse_flag: bool = False,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fused_infer_attention_score`, into given tensors and on a given workspace.

    The second of `out` is written only under its flag: vllm-ascend passes a dummy.
    """
    attention_out, softmax_lse = out
    contracts.check_shape(FUSED, "attention_out", attention_out, query.shape)
    contracts.check_same_dtype(FUSED, query=query, attention_out=attention_out)
    lse = softmax_lse if softmax_lse_flag else None
    if lse is not None:
        contracts.check_shape(FUSED, "softmax_lse", lse, (*query.shape[:2], 1))
        contracts.check_dtype(FUSED, "softmax_lse", lse, (torch.float32,))
    _fused(query, key, value, attention_out, lse, workspace, **arguments)
    return attention_out, softmax_lse


@operator("npu::_npu_fused_infer_attention_score_get_max_workspace")
def fused_infer_attention_score_get_max_workspace(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_lse_flag: bool = False,
    **arguments: Any,
) -> torch.Tensor:
    """A workspace for the ``out`` form with these arguments, of `query`'s type.

    See `contracts.attention_workspace_bytes` for its size.
    """
    needed = _check_fused(query, key, value, **arguments)
    return torch.empty(needed // query.element_size(), dtype=query.dtype)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None = None,
    **arguments: Any,
) -> None:
    """Check the call, then attend sequence by sequence.

    Of the operator's arguments these matter: ``num_heads``, ``num_key_value_heads`` (0:
    as many), ``scale``, ``input_layout``, ``sparse_mode`` (0: every key is seen, 2: the
    causal diagonal starts upper left, 3: it ends lower right), ``atten_mask``,
    ``actual_seq_lengths`` (cumulative), ``actual_seq_lengths_kv`` (cumulative, with a
    ``block_table`` each sequence's own), ``block_table``, ``block_size``. By the
    documentation ``pre_tokens`` and ``next_tokens`` mean nothing in these modes.
    ``inner_precise`` chooses between precisions that are one here.
    """
    needed = _check_fused(query, key, value, **arguments)
    contracts.check_workspace(FUSED, workspace, needed)
    _attend_all(query, key, value, out, lse, **arguments)


def _attend_all(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    scale: float = 1.0,
    sparse_mode: int = 0,
    atten_mask: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    **others: object,
) -> None:
    kv_heads = num_key_value_heads or num_heads
    hidden = None if atten_mask is None else atten_mask[..., :ROWS, :ROWS].bool()
    hidden = None if hidden is None else hidden.reshape(ROWS, ROWS)
    out.zero_()
    if lse is not None:
        lse.fill_(torch.inf)
    queries = pairwise((0, *actual_seq_lengths))
    if block_table is None:
        spans = list(pairwise((0, *actual_seq_lengths_kv)))
    else:
        spans = [(0, length) for length in actual_seq_lengths_kv]
    for row, ((start, stop), (kv_start, kv_stop)) in enumerate(
        zip(queries, spans, strict=True)
    ):
        tokens, length = stop - start, kv_stop - kv_start
        if tokens == 0 or length == 0:
            continue
        if block_table is None:
            keys, values = key[kv_start:kv_stop], value[kv_start:kv_stop]
        else:
            keys, values = gather_paged(
                FUSED, (key, value), block_table, row, length, kv_heads
            )
        attend(
            *(query[start:stop], keys, values, scale, out[start:stop]),
            None if lse is None else lse[start:stop, :, 0],
            hidden,
            length - tokens if sparse_mode == 3 else 0,
        )


def _check_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    atten_mask: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    block_size: int = 0,
    inner_precise: int = 0,
    scale: float = 1.0,
    pre_tokens: int = 0,
    next_tokens: int = 0,
    **features: object,
) -> int:
    """Refuse what CANN would refuse; bytes of workspace that the call needs."""
    wanted = [
        name
        for name, given in features.items()
        if given is not None and not (isinstance(given, int) and given == 0)
    ]
    check_emulated(not wanted, FUSED, f"argument {', '.join(wanted)}")
    contracts.check_layout(FUSED, input_layout)
    check(0 <= inner_precise <= 3, FUSED, f"inner_precise {inner_precise}, not 0 to 3")
    contracts.check_same_dtype(FUSED, query=query, key=key, value=value)
    contracts.check_dtype(FUSED, "query", query, FLOATS)
    kv_heads = num_key_value_heads or num_heads
    contracts.check_heads(FUSED, num_heads, kv_heads)
    contracts.check_tnd_query(FUSED, query, num_heads)
    contracts.check_causal_mask(FUSED, sparse_mode, atten_mask)
    tokens, _, head_size = query.shape
    ends = contracts.check_lengths(FUSED, "actual_seq_lengths", actual_seq_lengths)
    contracts.check_cumulative(FUSED, "actual_seq_lengths", ends, tokens)
    name = "actual_seq_lengths_kv"
    lengths = contracts.check_lengths(FUSED, name, actual_seq_lengths_kv)
    check(
        len(ends) == len(lengths),
        FUSED,
        f"{len(ends)} lengths in actual_seq_lengths, {len(lengths)} in {name}",
    )
    if block_table is None:
        contracts.check_shape(FUSED, "key", key, (None, kv_heads, head_size))
        contracts.check_cumulative(FUSED, name, lengths, key.shape[0])
    else:
        contracts.check_paged_cache(FUSED, key, block_size, kv_heads)
        contracts.check_shape(FUSED, "key", key, (None, None, kv_heads * head_size))
        contracts.check_block_table(FUSED, block_table, lengths, block_size)
    contracts.check_shape(FUSED, "value", value, key.shape)
    return contracts.attention_workspace_bytes(
        tokens, num_heads, kv_heads, head_size, len(ends)
    )
