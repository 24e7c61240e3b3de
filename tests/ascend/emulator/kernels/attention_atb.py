"""ATB's attention operators: paged attention for decode, flash attention for prefill.

vllm-ascend takes the first where ``pa_shape_list`` asks for it, the second on a 310P.
"""

import torch

from ascend.emulator import contracts
from ascend.emulator.contracts import check, check_emulated
from ascend.emulator.kernels.scaled_dot_product import ROWS, attend, gather_paged
from ascend.emulator.operators import operator

PAGED = "PagedAttentionOperation"
FLASH = "SelfAttentionOperation"
FLOATS = (torch.float16, torch.bfloat16)


@operator("atb::_npu_paged_attention")
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """Decode: one query token a sequence, all of whose keys lie in a paged cache.

    Args:
        query: ``[sequences, num_heads, head_size]``; tokens past the last of
            `context_lens` are padding, whose rows of `out` are not written.
        key_cache: ``[blocks, block_size, num_kv_heads, head_size]``.
        value_cache: as `key_cache`.
        num_kv_heads: heads of the cache.
        num_heads: heads of the query.
        scale_value: factor of the scores.
        block_table: ``[sequences, blocks of a sequence]`` int32.
        context_lens: ``[sequences]`` int32, tokens of each.
        out: as `query`, written.
        workspace: of `paged_attention_get_workspace`.
    """
    lengths, needed = _check_paged(
        *(query, key_cache, value_cache, num_kv_heads, num_heads),
        *(block_table, context_lens, out),
    )
    contracts.check_workspace(PAGED, workspace, needed)
    caches = (key_cache, value_cache)
    out[: len(lengths)].zero_()
    for row, length in enumerate(lengths):
        keys, values = gather_paged(
            PAGED, caches, block_table, row, length, num_kv_heads
        )
        attend(query[row : row + 1], keys, values, scale_value, out[row : row + 1])


@operator("atb::_npu_paged_attention_get_workspace")
def paged_attention_get_workspace(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """A workspace for `paged_attention` with these arguments, in bytes."""
    _, needed = _check_paged(
        *(query, key_cache, value_cache, num_kv_heads, num_heads),
        *(block_table, context_lens, out),
    )
    return torch.empty(needed, dtype=torch.uint8)


def _check_paged(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> tuple[list[int], int]:
    """Each sequence's length, and the bytes of workspace that the call needs."""
    contracts.check_same_dtype(
        PAGED, query=query, key_cache=key_cache, value_cache=value_cache, out=out
    )
    contracts.check_dtype(PAGED, "query", query, FLOATS)
    contracts.check_heads(PAGED, num_heads, num_kv_heads)
    contracts.check_shape(PAGED, "query", query, (None, num_heads, None))
    tokens, _, head_size = query.shape
    contracts.check_shape(PAGED, "out", out, query.shape)
    contracts.check_shape(
        PAGED, "key_cache", key_cache, (None, None, num_kv_heads, head_size)
    )
    contracts.check_shape(PAGED, "value_cache", value_cache, key_cache.shape)
    contracts.check_dtype(PAGED, "context_lens", context_lens, (torch.int32,))
    lengths = contracts.check_lengths(PAGED, "context_lens", context_lens.tolist())
    check(
        len(lengths) <= tokens,
        PAGED,
        f"{len(lengths)} context_lens, but only {tokens} query tokens",
    )
    contracts.check_block_table(PAGED, block_table, lengths, key_cache.shape[1])
    needed = contracts.attention_workspace_bytes(
        tokens, num_heads, num_kv_heads, head_size, len(lengths)
    )
    return lengths, needed


@operator("atb::_npu_flash_attention")
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: torch.Tensor,
) -> None:
    """Prefill without a cache: causal attention within each of the sequences.

    vllm-ascend's mask (`_generate_attn_mask`) is 0 where a key is seen; what else
    stands there depends on the type. Like the fused operator's it is laid over the
    diagonal. The 310P's fractal form of it is not emulated.

    Args:
        query: ``[tokens, num_heads, head_size]``.
        key: ``[tokens, num_kv_heads, head_size]``.
        value: as `key`.
        mask: ``[n, n]``, n at least the longest sequence.
        seq_len: ``[sequences]`` int32, tokens of each.
        scale_value: factor of the scores.
        num_heads: heads of the query.
        num_kv_heads: heads of the keys.
        out: as `query`, written.
    """
    contracts.check_same_dtype(FLASH, query=query, key=key, value=value, out=out)
    contracts.check_dtype(FLASH, "query", query, FLOATS)
    contracts.check_heads(FLASH, num_heads, num_kv_heads)
    contracts.check_shape(FLASH, "query", query, (None, num_heads, None))
    tokens, _, head_size = query.shape
    contracts.check_shape(FLASH, "out", out, query.shape)
    contracts.check_shape(FLASH, "key", key, (tokens, num_kv_heads, head_size))
    contracts.check_shape(FLASH, "value", value, key.shape)
    contracts.check_dtype(FLASH, "seq_len", seq_len, (torch.int32,))
    lengths = contracts.check_lengths(FLASH, "seq_len", seq_len.tolist())
    check_emulated(mask.dim() == 2, FLASH, f"a mask of {mask.dim()} dimensions")
    check(
        sum(lengths) == tokens,
        FLASH,
        f"seq_len adds up to {sum(lengths)}, but there are {tokens} tokens",
    )
    check(
        min(mask.shape) >= max(lengths),
        FLASH,
        f"mask {list(mask.shape)} is smaller than a sequence of {max(lengths)} tokens",
    )
    hidden = mask[:ROWS, :ROWS] != 0
    out.zero_()
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        attend(
            *(query[here], key[here], value[here], scale_value, out[here]),
            hidden=hidden,
        )
        start += length
