"""Rotary position embedding, in place on query and key."""

import torch

from ascend.emulator.contracts import check, check_dtype
from ascend.emulator.operators import operator

ROPE = "RopeOperation"


@operator("atb::_npu_rotary_embedding")
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool = True,
) -> None:
    """Turn pairs of channels by the angle of their position.

    Source: ``rotary_embedding`` of vLLM's csrc/pos_encoding_kernels.cu, whose place it
    takes in vllm-ascend. Computed in fp32, rounded once.

    Args:
        positions: ``[tokens]``.
        query: ``[tokens, heads · head_size]``, written.
        key: ``[tokens, kv_heads · head_size]``, written.
        head_size: channels of a head.
        cos_sin_cache: ``[positions, rotary_dim]``: cos | sin. Channels of a head from
            ``rotary_dim`` on are not turned.
        is_neox_style: pairs are a channel of the first and one of the second half;
            otherwise they are neighbours.
    """
    check_dtype(ROPE, "positions", positions, (torch.int32, torch.int64))
    limit = len(cos_sin_cache)
    if positions.numel():
        last = int(positions.max())
        check(
            int(positions.min()) >= 0 and last < limit,
            ROPE,
            f"position {last} is outside of the cache of {limit}",
        )
    cos, sin = cos_sin_cache[positions.flatten().long()].float()[:, None].chunk(2, -1)
    for tensor in (query, key):
        width = tensor.shape[-1] if tensor.dim() == 2 else tensor[0].numel()
        check(
            width % head_size == 0,
            ROPE,
            f"a width of {width} is no multiple of the head size {head_size}",
        )
        heads = tensor.view(positions.numel(), -1, head_size)
        turned = heads[..., : cos_sin_cache.shape[-1]]
        x = turned.float()
        if is_neox_style:
            first, second = x.chunk(2, -1)
        else:
            first, second = x[..., ::2], x[..., 1::2]
        pairs = first * cos - second * sin, second * cos + first * sin
        joined = torch.cat(pairs, -1) if is_neox_style else torch.stack(pairs, -1)
        turned.copy_(joined.reshape(x.shape))
