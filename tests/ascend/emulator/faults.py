"""Mistakes to make on purpose, so that the tests show that they would see them.

The variable NPU_EMULATOR_FAULT names one. ``all_reduce``, which leaves each rank with
its own part of a sum, is made in ``runtime/hccl.c``.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from ascend.emulator.operators import OPERATORS

_VARIABLE = "NPU_EMULATOR_FAULT"
_ATTENTION = "npu::npu_fused_infer_attention_score"
_WORKSPACE = "npu::_npu_fused_infer_attention_score_get_max_workspace"


def _without_mask(attention: Callable[..., Any], *tensors: Any, **keywords: Any) -> Any:
    """Every token sees the future."""
    return attention(*tensors, **keywords | {"sparse_mode": 0, "atten_mask": None})


def _one_slot_late(
    write: Callable[..., Any],
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> Any:
    """Keys and values go one slot too far in the KV cache."""
    slots = key_cache.shape[0] * key_cache.shape[1]
    return write(key, value, key_cache, value_cache, (slot_indices + 1) % slots)


def _swapped(
    rope: Callable[..., Any],
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool = True,
) -> Any:
    """Sines for cosines."""
    sin_cos = cos_sin_cache.roll(cos_sin_cache.shape[-1] // 2, -1)
    return rope(positions, query, key, head_size, sin_cos, is_neox_style)


def _of_a_smaller_layer(
    workspace: Callable[..., Any], *tensors: Any, **keywords: Any
) -> torch.Tensor:
    """What a graph keeps from a layer with half the heads."""
    whole = workspace(*tensors, **keywords)
    return whole[: len(whole) // 2]


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "cos_sin": ("atb::_npu_rotary_embedding", _swapped),
    "mask": (_ATTENTION, _without_mask),
    "slot": ("atb::_npu_reshape_and_cache", _one_slot_late),
    "workspace": (_WORKSPACE, _of_a_smaller_layer),
}


def seed_fault() -> None:
    """Make the mistake that the variable names, from here on in this process."""
    if (fault := os.environ.get(_VARIABLE)) in FAULTS:
        name, mistake = FAULTS[fault]
        right = OPERATORS[name]

        def wrong(*tensors: Any, **keywords: Any) -> Any:
            return mistake(right.kernel, *tensors, **keywords)

        OPERATORS[name] = right._replace(kernel=wrong)
