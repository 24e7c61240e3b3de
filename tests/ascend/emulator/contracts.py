"""What CANN refuses before it runs a kernel, refused here in the same places.

A kernel's tiling code checks shapes, types and lengths on the host and fails the call
(error 561002 and its like); what it cannot check, the device gets wrong in silence.
The emulator fails in both cases, and says what was found and what is allowed.

Sources: the documentation in torch_npu's ``_op_plugin_docs.py`` (in the docstrings
below: "documentation"), and the tiling code of CANN's open operator repository
ops-transformer ("tiling").
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

MAX_TOKENS = 1 << 20
"""Most query tokens of a call in layout TND (documentation of the second version)."""
MAX_GROUP = 64
"""Most query heads that share a KV head."""
TND_HEAD_SIZES = (64, 128, 192)
"""Tiling: the sizes that every route through it takes in layout TND."""
MASK_SIZE = 2048
"""Rows and columns of the compressed mask of sparse modes 2, 3 and 4."""
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
MAX_CACHE_ROW = 65535
"""Most values that one token takes in a paged cache: the reach of an instruction."""
LAYOUTS = (
    *("BSH", "BSND", "BNSD", "TND", "NTD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD"),
    *("BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD", "NTD_TND"),
)
"""Layouts that CANN has."""


class CannError(RuntimeError):
    """CANN would refuse this call, or the device would corrupt memory by it."""


class NotEmulatedError(CannError, NotImplementedError):
    """CANN can do it, the emulator cannot: nothing that it serves asks for it."""


def check(holds: bool, operator: str, message: str) -> None:
    """Raise `CannError` in the name of `operator` unless the condition `holds`."""
    if not holds:
        raise CannError(f"[emulated CANN] {operator}: {message}")


def check_emulated(holds: bool, operator: str, message: str) -> None:
    """As `check`, for what CANN would have done."""
    if not holds:
        raise NotEmulatedError(f"[emulated CANN] {operator}: not emulated: {message}")


def check_dtype(
    operator: str, name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]
) -> None:
    """`tensor` has one of the `allowed` types."""
    check(
        tensor.dtype in allowed,
        operator,
        f"{name} is {tensor.dtype}, allowed: {', '.join(map(str, allowed))}",
    )


def check_same_dtype(operator: str, **tensors: torch.Tensor) -> None:
    """All `tensors` have one type."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    check(
        len(set(dtypes.values())) == 1,
        operator,
        f"types differ: {', '.join(f'{n} {d}' for n, d in dtypes.items())}",
    )


def check_shape(
    operator: str, name: str, tensor: torch.Tensor, allowed: Sequence[int | None]
) -> None:
    """`tensor` has the shape `allowed`, where None stands for any extent."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(allowed) and all(
        extent in (None, found) for extent, found in zip(allowed, shape, strict=True)
    )
    wanted = ", ".join("any" if extent is None else str(extent) for extent in allowed)
    check(fits, operator, f"{name} has shape {list(shape)}, allowed: [{wanted}]")


def check_heads(operator: str, num_heads: int, num_kv_heads: int) -> None:
    """Query heads divide evenly among KV heads, at most 64 to one (documentation)."""
    check(
        num_heads > 0 and num_kv_heads > 0,
        operator,
        f"{num_heads} query and {num_kv_heads} KV heads: both must be positive",
    )
    check(
        num_heads % num_kv_heads == 0,
        operator,
        f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads",
    )
    check(
        num_heads // num_kv_heads <= MAX_GROUP,
        operator,
        f"{num_heads // num_kv_heads} query heads share a KV head, "
        f"allowed: at most {MAX_GROUP}",
    )


def check_layout(operator: str, layout: str) -> None:
    """The layout is TND, the one that vllm-ascend's dense attention uses."""
    check(layout in LAYOUTS, operator, f"no layout {layout!r}, allowed: {LAYOUTS}")
    check_emulated(layout == "TND", operator, f"layout {layout!r}, only TND is")


def check_tnd_query(operator: str, query: torch.Tensor, num_heads: int) -> None:
    """`query` is ``[tokens, num_heads, head_size]`` of a size that TND takes.

    The documentation lists 128 and 192 for this layout, the tiling takes 64 as well:
    only an NPU can settle which of the two a release follows.
    """
    check_shape(operator, "query", query, (None, num_heads, None))
    tokens, _, head_size = query.shape
    check(
        head_size in TND_HEAD_SIZES,
        operator,
        f"head size {head_size} in layout TND, allowed: {TND_HEAD_SIZES}",
    )
    check(
        tokens <= MAX_TOKENS,
        operator,
        f"{tokens} query tokens, allowed: at most {MAX_TOKENS}",
    )


def check_lengths(operator: str, name: str, lengths: Sequence[int] | None) -> list[int]:
    """`lengths` are given, at least one and none negative. Returns them as a list."""
    check(
        bool(lengths), operator, f"{name} must be given in layout TND, found {lengths}"
    )
    values = [int(length) for length in lengths or ()]
    check(min(values) >= 0, operator, f"{name} has negative lengths: {values}")
    return values


def check_cumulative(
    operator: str, name: str, lengths: Sequence[int], tokens: int
) -> None:
    """`lengths` are ends of sequences: never decreasing, the last one is `tokens`."""
    check(
        all(a <= b for a, b in pairwise(lengths)),
        operator,
        f"{name} must be cumulative and not decrease: {list(lengths)}",
    )
    check(
        lengths[-1] == tokens,
        operator,
        f"{name} ends with {lengths[-1]}, but there are {tokens} tokens",
    )


def check_causal_mask(
    operator: str, sparse_mode: int, mask: torch.Tensor | None
) -> None:
    """Modes 2 and 3 come with a 2048 × 2048 mask of one byte, mode 0 with none.

    Mode 0 with a mask exists in other layouts; in TND the tiling refuses it.
    """
    check(
        sparse_mode in (0, 1, 2, 3, 4, 9),
        operator,
        f"no sparse_mode {sparse_mode}, allowed: 0, 1, 2, 3, 4, 9",
    )
    check_emulated(
        sparse_mode in (0, 2, 3), operator, f"sparse_mode {sparse_mode}, only 0, 2, 3"
    )
    if sparse_mode == 0:
        check(mask is None, operator, "sparse_mode 0 takes no atten_mask in layout TND")
        return
    check(mask is not None, operator, f"sparse_mode {sparse_mode} needs an atten_mask")
    assert mask is not None
    check_dtype(operator, "atten_mask", mask, MASK_DTYPES)
    ones = (1,) * min(mask.dim() - 2, 2)
    check_shape(operator, "atten_mask", mask, (*ones, MASK_SIZE, MASK_SIZE))


def check_paged_cache(
    operator: str, cache: torch.Tensor, block_size: int, num_kv_heads: int
) -> None:
    """`cache` is ``[blocks, block_size, row]`` of blocks that the tiling takes.

    The tiling takes blocks up to 1024, the documentation up to 512. The second form,
    ``[blocks, kv_heads, block_size, head_size]``, is not emulated.
    """
    check_emulated(
        cache.dim() not in (4, 5),
        operator,
        f"a paged cache of {cache.dim()} dimensions",
    )
    check(
        block_size % 128 == 0 and 128 <= block_size <= 1024,
        operator,
        f"block_size {block_size}, allowed: multiples of 128 from 128 to 1024",
    )
    check_shape(operator, "key", cache, (None, block_size, None))
    row = cache.shape[-1]
    check(
        row <= MAX_CACHE_ROW,
        operator,
        f"{num_kv_heads} KV heads take {row} values a token in the cache, "
        f"allowed: at most {MAX_CACHE_ROW}",
    )


def check_block_table(
    operator: str, table: torch.Tensor, lengths: Sequence[int], block_size: int
) -> None:
    """`table` is int32 with a row a sequence, wide enough for the longest of them."""
    check_dtype(operator, "block_table", table, (torch.int32,))
    check_shape(operator, "block_table", table, (len(lengths), None))
    needed = -(-max(lengths) // block_size)
    check(
        table.shape[1] >= needed,
        operator,
        f"block_table has {table.shape[1]} columns, a sequence of {max(lengths)} "
        f"tokens needs {needed} blocks of {block_size}",
    )


def attention_workspace_bytes(
    tokens: int, num_heads: int, num_kv_heads: int, head_size: int, sequences: int
) -> int:
    """Bytes of workspace of an attention call. The formula is ours.

    CANN's depends on the chip and on which of its kernels a call takes, and is public
    only in part. Ours holds what such a kernel keeps between its passes: for each
    query token and head a row of fp32 results with its maximum and sum, and for each
    KV head and sequence a descriptor of 512 bytes. It grows in every argument, so a
    layer with more heads needs more.

    ``get_max_workspace`` answers for every way to part `tokens` into sequences, hence
    the larger of the two numbers: a graph may be replayed with other sequences than
    it was captured with.
    """
    results = 4 * tokens * num_heads * (head_size + 2)
    return results + 512 * num_kv_heads * max(tokens, sequences)


def check_workspace(operator: str, workspace: torch.Tensor | None, needed: int) -> None:
    """A caller's `workspace` is large enough; without one the operator takes its own.

    The device does not check it: it would write into whatever memory comes after.
    """
    if workspace is None:
        return
    given = workspace.numel() * workspace.element_size()
    check(
        given >= needed,
        operator,
        f"the workspace has {given} bytes, this call needs {needed}: "
        "the device would write past its end",
    )


def check_slots(operator: str, slots: torch.Tensor, tokens: int, limit: int) -> None:
    """One slot a token, each below `limit`, the cache's; negative ones are padding."""
    check_shape(operator, "slots", slots, (tokens,))
    last = int(slots.max()) if tokens else -1
    check(
        last < limit,
        operator,
        f"slot {last} is outside of the cache, which has {limit} slots",
    )
