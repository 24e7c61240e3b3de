"""Plans of heads over ranks: complete, minimal, and exact in attention itself."""

from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from vllm_ascend_models.ops.gqa import plan_heads  # noqa: E402

HEAD_DIM = 4


def every_layer():
    for num_kv_heads, group in product(range(1, 65), range(1, 65)):
        if num_kv_heads * group <= 64:
            yield num_kv_heads * group, num_kv_heads


@pytest.mark.parametrize("tp_size", range(1, 65))
def test_every_head_is_computed_once_beside_its_kv_head(tp_size):
    for num_heads, num_kv_heads in every_layer():
        plan = plan_heads(num_heads, num_kv_heads, tp_size)
        computed = [head for head in plan.query_slots if head is not None]
        assert computed == list(range(num_heads))
        group = num_heads // num_kv_heads
        slots_per_kv, rest = divmod(plan.num_heads, plan.num_kv_heads)
        assert rest == 0
        for slot, head in enumerate(plan.query_slots):
            if head is not None:
                assert plan.kv_slots[slot // slots_per_kv] == head // group


@pytest.mark.parametrize("tp_size", range(1, 65))
def test_no_rank_keeps_more_kv_heads_than_it_must(tp_size):
    for num_heads, num_kv_heads in every_layer():
        plan = plan_heads(num_heads, num_kv_heads, tp_size)
        assert plan.num_kv_heads == -(-num_kv_heads // tp_size)


def test_where_heads_divide_each_is_where_vllm_puts_it():
    for num_heads, num_kv_heads in every_layer():
        for tp_size in range(1, num_kv_heads + 1):
            plan = plan_heads(num_heads, num_kv_heads, tp_size)
            assert plan.is_identity == (num_kv_heads % tp_size == 0)


def test_the_drawing_is_right():
    two, eight = plan_heads(6, 3, 2), plan_heads(6, 3, 8)
    assert two.kv_slots == (0, 1, 2, None)
    assert two.query_slots == (0, 1, 2, 3, 4, 5, None, None)
    assert eight.kv_slots == (0, 0, 1, 1, 2, 2, None, None)
    assert eight.query_slots == (0, 1, 2, 3, 4, 5, None, None)


# Layers with 3, 4, … KV heads, and the KV heads of a rank over all at TP 2 and TP 4.
PUBLISHED = {
    "270M": ([5, 7, 4], 36, 20),
    "450M": ([3, 7, 6, 4], 50, 30),
    "1.1B": ([0, 3, 7, 8, 6, 4], 91, 53),
    "3B": ([4, 14, 12, 6], 90, 54),
}


@pytest.mark.parametrize(("layers", "at_2", "at_4"), PUBLISHED.values(), ids=PUBLISHED)
def test_kv_heads_of_a_rank_of_the_published_sizes(layers, at_2, at_4):
    for tp_size, expected in ((2, at_2), (4, at_4)):
        plans = {kv: plan_heads(4 * kv, kv, tp_size) for kv in range(3, 9)}
        by_layer = zip(range(3, 9), layers, strict=False)
        assert sum(n * plans[kv].num_kv_heads for kv, n in by_layer) == expected


def attention(qkv, num_heads, num_kv_heads, output):
    """Causal attention and output projection of a fused ``[q + 2 kv, D, in]``."""
    hidden = torch.linspace(-1, 1, 5 * 6).view(5, 6).double()
    heads = (hidden @ qkv.T).view(5, -1, HEAD_DIM).transpose(0, 1)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads])
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(0, 1).flatten(1) @ output.T


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(12, 3), (5, 5), (20, 5)])
def test_ranks_sum_to_the_attention_of_one_device(num_heads, num_kv_heads, tp_size):
    generator = torch.Generator().manual_seed(num_heads)
    rows = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    qkv = torch.randn(rows, 6, generator=generator).double()
    output = torch.randn(7, num_heads * HEAD_DIM, generator=generator).double()
    plan = plan_heads(num_heads, num_kv_heads, tp_size)

    laid_out = plan.lay_out_qkv(qkv).unflatten(0, (-1, HEAD_DIM))
    counts = [len(plan.query_slots), len(plan.kv_slots), len(plan.kv_slots)]
    by_rank = [part.chunk(tp_size) for part in laid_out.split(counts)]
    outputs = plan.lay_out_output(output).chunk(tp_size, dim=1)
    total = torch.zeros(5, 7).double()
    for q, k, v, columns in zip(*by_rank, outputs, strict=True):
        own = torch.cat([q, k, v]).flatten(0, 1)
        total += attention(own, plan.num_heads, plan.num_kv_heads, columns)
    expected = attention(qkv, num_heads, num_kv_heads, output)
    torch.testing.assert_close(total, expected)
