"""Per-layer sizes of OpenELM as pure functions, from Apple's configuration keys.

OpenELM scales its layers: the further up, the more heads and the wider the FFN.
Source: Mehta et al., "OpenELM", arXiv 2404.14619, section 2 (layer-wise scaling),
and corenet's ``general_gpt.py``. Nothing here imports anything outside the
standard library.
"""

from collections.abc import Sequence
from dataclasses import dataclass


def make_divisible(value: float, divisor: int) -> int:
    """Round to the nearest multiple, but never more than 10 % down.

    Args:
        value: the size wanted, for example ``multiplier * model_dim``.
        divisor: the result is a multiple of it, and at least it.

    Returns:
        The nearest multiple of ``divisor``; where that lies below 0.9 of
        ``value``, one ``divisor`` more. ``make_divisible(2.97 * 128, 256)`` is 512.
    """
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


def spread_multipliers(multipliers: Sequence[float], num_layers: int) -> list[float]:
    """One multiplier a layer, linearly spaced from the first to the last given.

    Args:
        multipliers: two values, of the first and of the last layer, or already
            one for each layer, which is returned unchanged.
        num_layers: layers of the model.

    Returns:
        ``num_layers`` multipliers, the interpolated ones rounded to 2 places as
        corenet does.
    """
    if len(multipliers) == num_layers:
        return [float(m) for m in multipliers]
    first, last = multipliers
    step = (last - first) / max(num_layers - 1, 1)
    return [round(first + step * layer, 2) for layer in range(num_layers)]


def derive_num_query_heads(
    qkv_multipliers: Sequence[float],
    *,
    model_dim: int,
    head_dim: int,
    num_gqa_groups: int,
    num_layers: int,
) -> list[int]:
    """Query heads of each layer: whole groups whose width is near ``m * model_dim``."""
    divisor = head_dim * num_gqa_groups
    return [
        make_divisible(model_dim * m, divisor) // head_dim
        for m in spread_multipliers(qkv_multipliers, num_layers)
    ]


def derive_ffn_intermediate_sizes(
    ffn_multipliers: Sequence[float],
    *,
    model_dim: int,
    ffn_dim_divisor: int,
    num_layers: int,
) -> list[int]:
    """FFN width of each layer, ``make_divisible(m * model_dim, ffn_dim_divisor)``."""
    return [
        make_divisible(m * model_dim, ffn_dim_divisor)
        for m in spread_multipliers(ffn_multipliers, num_layers)
    ]


@dataclass(frozen=True)
class LayerGeometry:
    """Sizes of one decoder layer."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @property
    def qkv_size(self) -> int:
        """Rows of the fused ``q | k | v`` projection."""
        return (self.num_query_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_cache_elements_per_token(self) -> int:
        """Elements of K and V that this layer keeps for each token."""
        return 2 * self.num_kv_heads * self.head_dim


def tensor_parallel_sizes(layers: Sequence[LayerGeometry]) -> list[int]:
    """Tensor-parallel sizes that every layer can run at.

    Heads may be uneven, see `vllm_ascend_models.ops.gqa`. The width of the FFN has to
    divide, and no rank beyond the query heads of the narrowest layer is of use.
    """
    narrowest = min(layer.num_query_heads for layer in layers)
    widths = {layer.intermediate_size for layer in layers}
    return [
        tp for tp in range(1, narrowest + 1) if all(width % tp == 0 for width in widths)
    ]
