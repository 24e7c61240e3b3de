"""The sizes of the four published models, to the last head and parameter."""

import math
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_models.openelm.geometry import (
    LayerGeometry,
    make_divisible,
    spread_multipliers,
    tensor_parallel_sizes,
)

transformers = pytest.importorskip("transformers", reason="needs transformers")
from vllm_ascend_models.openelm.checkpoint import expected_tensors  # noqa: E402
from vllm_ascend_models.openelm.config import OpenELMConfig  # noqa: E402

# size: layers, dim, head, (query heads, KV heads, layers)..., millions of parameters,
# KV bytes a token in bf16, first and last FFN width.
PUBLISHED = {
    "270M": (16, 1280, 64, [(12, 3, 5), (16, 4, 7), (20, 5, 4)], 271.5, 16128, 768),
    "450M": (
        *(20, 1536, 64, [(12, 3, 3), (16, 4, 7), (20, 5, 6), (24, 6, 4)]),
        *(457.2, 23296, 768),
    ),
    "1_1B": (
        *(28, 2048, 64, [(16, 4, 3), (20, 5, 7), (24, 6, 8), (28, 7, 6), (32, 8, 4)]),
        *(1079.9, 43264, 1024),
    ),
    "3B": (
        *(36, 3072, 128, [(12, 3, 4), (16, 4, 14), (20, 5, 12), (24, 6, 6)]),
        *(3036.6, 83968, 1536),
    ),
}


@pytest.fixture(params=PUBLISHED)
def published(request):
    """A published size, its configuration derived from the multipliers alone."""
    layers, dim, head_dim, *_ = figures = PUBLISHED[request.param]
    config = OpenELMConfig(
        num_transformer_layers=layers,
        model_dim=dim,
        head_dim=head_dim,
        num_gqa_groups=4,
        qkv_multipliers=[0.5, 1.0],
        ffn_multipliers=[0.5, 4.0],
        normalize_qk_projections=True,
        share_input_output_layers=True,
    )
    return config, figures


def test_every_layer_of_a_published_size_has_its_heads(published):
    config, (_, _, _, runs, *_) = published
    assert config.num_query_heads == list(chain(*(repeat(q, n) for q, _, n in runs)))
    assert config.num_kv_heads == list(chain(*(repeat(kv, n) for _, kv, n in runs)))


def test_a_published_size_has_its_parameters(published):
    config, (*_, millions, _, _) = published
    total = sum(math.prod(shape) for shape in expected_tensors(config).values())
    assert round(total / 1e6, 1) == millions


def test_a_published_size_keeps_its_kv_bytes_per_token(published):
    config, (*_, kv_bytes, _) = published
    elements = sum(x.kv_cache_elements_per_token for x in config.layer_geometry())
    assert 2 * elements == kv_bytes


def test_ffn_widths_grow_from_first_to_last_in_whole_divisors(published):
    config, (_, dim, *_, first) = published
    widths = [layer.intermediate_size for layer in config.layer_geometry()]
    assert (widths[0], widths[-1]) == (first, 4 * dim)
    assert widths == sorted(widths)
    assert all(width % 256 == 0 for width in widths)


def test_a_published_size_splits_over_devices(published):
    config, _ = published
    assert {1, 2, 4, 8} <= set(tensor_parallel_sizes(config.layer_geometry()))


@pytest.mark.parametrize(
    ("value", "divisor", "expected"),
    [
        (2.97 * 128, 256, 512),  # the nearest, 256, lies more than 10 % below
        (0.5 * 128, 256, 256),  # never less than the divisor
        (1.0 * 1536, 256, 1536),
        (383, 256, 512),  # 256 is nearer, but below 0.9 of 383
        (384, 256, 512),
        (280, 256, 256),
    ],
)
def test_make_divisible(value, divisor, expected):
    assert make_divisible(value, divisor) == expected


@given(st.floats(0.001, 1e6), st.integers(1, 4096))
def test_make_divisible_is_a_near_multiple(value, divisor):
    result = make_divisible(value, divisor)
    assert result % divisor == 0
    assert result >= divisor
    assert result >= 0.9 * value
    assert result - value <= divisor


def test_multipliers_are_spread_over_layers_and_rounded_to_two_places():
    assert spread_multipliers([0.5, 1.0], 4) == [0.5, 0.67, 0.83, 1.0]
    assert spread_multipliers([0.5, 4.0, 1.0], 3) == [0.5, 4.0, 1.0]
    assert spread_multipliers([0.5, 4.0], 1) == [0.5]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([(8, 4, 512)], [1, 2, 4, 8]),
        ([(8, 2, 512), (12, 3, 512)], [1, 2, 4, 8]),
        ([(6, 1, 768), (12, 3, 1536)], [1, 2, 3, 4, 6]),
        ([(3, 3, 512), (4, 4, 512)], [1, 2]),
    ],
)
def test_tensor_parallel_sizes_divide_the_ffn_and_leave_no_rank_without_heads(
    layers, expected
):
    geometry = [LayerGeometry(q, kv, 64, width) for q, kv, width in layers]
    assert tensor_parallel_sizes(geometry) == expected
