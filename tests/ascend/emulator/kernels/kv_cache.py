"""Writing keys and values into the paged KV cache.

A slot is a token's place in the cache: ``block × block_size + offset``. Negative slots
are skipped: vllm fills the slots of padding tokens with -1. Of tokens with one slot the
last wins here, any on a device: vllm-ascend's dummy runs write slot 0 many times.
"""

import torch

from ascend.emulator.contracts import (
    check,
    check_dtype,
    check_emulated,
    check_same_dtype,
    check_shape,
    check_slots,
)
from ascend.emulator.operators import operator

RESHAPE = "ReshapeAndCacheOperation"
SCATTER = "aclnnScatterPaKvCache"


@operator("atb::_npu_reshape_and_cache")
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Write each token's key and value into its slot.

    ATB takes slots of int32 only, for which vllm-ascend's attention_v1.py converts
    where it has others.

    Args:
        key: ``[tokens, heads, head_size]``.
        value: as `key`, its head size may differ.
        key_cache: ``[blocks, block_size, heads, head_size]``, written.
        value_cache: as `key_cache`, written.
        slot_indices: ``[tokens]`` int32.
    """
    check_dtype(RESHAPE, "slot_indices", slot_indices, (torch.int32,))
    _check_writes(RESHAPE, key, value, key_cache, value_cache)
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        _write(RESHAPE, tokens, cache, slot_indices)


@operator("npu::npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """As `reshape_and_cache`, with slots of int64 as well and a choice of layouts.

    Source: torch_npu's documentation of the operator, its first two scenarios.

    Args:
        key: ``[tokens, heads, head_size]``.
        value: as `key`, its head size may differ.
        key_cache: written; ``[blocks, block_size, heads, head_size]`` in mode "Norm" or
            None, ``[blocks, heads × head_size / n, block_size, n]`` in "PA_NZ", where n
            values make 32 bytes.
        value_cache: as `key_cache`, written.
        slot_mapping: ``[tokens]`` int32 or int64.
        compress_lens: not emulated, as the next two: compression of the cache.
        compress_seq_offsets: not emulated.
        seq_lens: not emulated.
        cache_mode: layout of the caches.
    """
    compression = (compress_lens, compress_seq_offsets, seq_lens)
    plain = all(argument is None for argument in compression)
    check_emulated(plain, SCATTER, "compression of the cache")
    modes = (None, "Norm", "PA_NZ")
    check(cache_mode in modes, SCATTER, f"cache_mode {cache_mode!r}, allowed: {modes}")
    check_dtype(SCATTER, "slot_mapping", slot_mapping, (torch.int32, torch.int64))
    _check_writes(SCATTER, key, value, key_cache, value_cache)
    write = _write_fractal if cache_mode == "PA_NZ" else _write
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        write(SCATTER, tokens, cache, slot_mapping)


def _check_writes(
    name: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    check_same_dtype(
        name, key=key, value=value, key_cache=key_cache, value_cache=value_cache
    )
    check_shape(name, "key", key, (None, None, None))
    check_shape(name, "value", value, (*key.shape[:2], None))
    for cache in (key_cache, value_cache):
        check(cache.is_contiguous(), name, "a cache must be contiguous")


def _write(
    name: str, tokens: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Into ``[blocks, block_size, heads, head_size]``."""
    check_shape(name, "cache", cache, (None, None, *tokens.shape[1:]))
    check_slots(name, slots, len(tokens), cache.shape[0] * cache.shape[1])
    kept, slots = _without_padding(tokens, slots)
    cache.flatten(0, 1).index_copy_(0, slots, kept)


def _write_fractal(
    name: str, tokens: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Into ``[blocks, heads × head_size / n, block_size, n]``."""
    width = 32 // tokens.element_size()
    row = tokens.shape[1] * tokens.shape[2]
    check_shape(name, "cache", cache, (None, row // width, None, width))
    block_size = cache.shape[2]
    check_slots(name, slots, len(tokens), cache.shape[0] * block_size)
    kept, slots = _without_padding(tokens, slots)
    kept = kept.reshape(len(kept), row // width, width)
    cache[slots // block_size, :, slots % block_size] = kept


def _without_padding(
    tokens: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    real = slots >= 0
    if not bool(real.all()):
        tokens, slots = tokens[real], slots[real]
    return tokens, slots.long()
