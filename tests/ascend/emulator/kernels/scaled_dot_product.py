"""Attention of one sequence with grouped heads: the arithmetic under the operators.

Scores, softmax and sums are fp32, the result is rounded once. A device's kernel rounds
the probabilities to the inputs' type before it multiplies them with the values; how
much of that a caller sees is not for an emulator to say.
"""

from collections.abc import Sequence

import torch

from ascend.emulator.contracts import CannError

ROWS = 64
"""Query rows at a time: their scores stay in the processor's cache, and keys that no
row of the tile sees are left out."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    """Write ``softmax(scale · query · keyᵀ) · value`` into `out`.

    With `hidden`, row i sees keys up to ``i + offset``, and `hidden` is laid over the
    tile at that diagonal, as a device does with its compressed mask. Rows that see no
    key are left as they are in `out` and `lse`.

    Args:
        query: ``[tokens, heads, head_size]``.
        key: ``[length, kv_heads, head_size]``.
        value: as `key`.
        scale: factor of the scores.
        out: as `query`, written.
        lse: ``[tokens, heads]`` fp32, written with the logarithm of the scores' sum.
        hidden: at least ``[ROWS, ROWS]`` bool, True where a key is not seen.
        offset: key of the first row's diagonal.
    """
    tokens, num_heads, head_size = query.shape
    length, kv_heads, _ = key.shape
    if length == 0:
        return
    groups = (kv_heads, num_heads // kv_heads)
    # [kv_heads, group, tokens, …]: the heads of a group multiply the same keys.
    rows = query.float().mul_(scale) if query.dtype != torch.float32 else query * scale
    rows = rows.unflatten(1, groups).permute(1, 2, 0, 3)
    results = out.unflatten(1, groups).permute(1, 2, 0, 3)
    sums = None if lse is None else lse.unflatten(1, groups).permute(1, 2, 0)
    keys = key.float().permute(1, 2, 0)
    values = value.float().transpose(0, 1)
    first = 0 if hidden is None else max(0, -offset)
    for start in range(first, tokens, ROWS):
        stop = min(start + ROWS, tokens)
        seen = length if hidden is None else min(length, stop + offset)
        tile = rows[:, :, start:stop].reshape(kv_heads, -1, head_size)
        scores = (tile @ keys[..., :seen]).view(*groups, stop - start, seen)
        diagonal = start + offset
        if hidden is not None and diagonal < seen:
            mask = hidden[: stop - start, : seen - diagonal]
            scores[..., diagonal:].masked_fill_(mask, -torch.inf)
        if sums is not None:
            sums[:, :, start:stop] = scores.logsumexp(-1)
        weights = scores.softmax(-1).view(kv_heads, -1, seen)
        results[:, :, start:stop] = (weights @ values[:, :seen]).view(
            *groups, stop - start, head_size
        )


def gather_paged(
    operator: str,
    caches: Sequence[torch.Tensor],
    block_table: torch.Tensor,
    row: int,
    length: int,
    kv_heads: int,
) -> list[torch.Tensor]:
    """The first `length` tokens of a sequence whose blocks lie anywhere in `caches`.

    Args:
        operator: in whose name to fail.
        caches: each ``[blocks, block_size, …]``, a token's heads come last.
        block_table: ``[sequences, blocks of a sequence]``.
        row: the sequence.
        length: its tokens.
        kv_heads: heads of a token.

    Returns:
        Of each cache ``[length, kv_heads, head_size]``.

    Raises:
        CannError: a block is not in the cache. CANN leaves that to the caller: a device
            reads whatever lies there.
    """
    num_blocks, block_size = caches[0].shape[:2]
    blocks = block_table[row, : -(-length // block_size)]
    try:
        pages = [cache.index_select(0, blocks) for cache in caches]
    except IndexError as error:
        message = f"block_table[{row}] is {blocks.tolist()}, there are {num_blocks}"
        raise CannError(
            f"[emulated CANN] {operator}: {message} blocks: the device would read "
            "outside of the cache"
        ) from error
    head_size = caches[0][0, 0].numel() // kv_heads
    shape = (length, kv_heads, head_size)
    return [page.flatten(0, 1)[:length].reshape(shape) for page in pages]
