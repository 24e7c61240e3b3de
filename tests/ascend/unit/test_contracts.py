"""What CANN would refuse is refused: attention calls and their workspaces."""

import pytest
import torch

from ascend.emulator.contracts import (
    CannError,
    NotEmulatedError,
    attention_workspace_bytes,
)
from ascend.emulator.kernels.attention import (
    fused_infer_attention_score,
    fused_infer_attention_score_get_max_workspace,
    fused_infer_attention_score_out,
)
from ascend.unit.attention_batch import CAUSAL_MASK, Batch


def without(*names):
    return dict.fromkeys(names)


REFUSED = {
    "another layout": ({"input_layout": "BSH"}, "not emulated: layout 'BSH'"),
    "no layout": ({"input_layout": "DTN"}, "no layout 'DTN', allowed"),
    "heads of another count": (
        {"num_heads": 6},
        r"query has shape \[6, 4, 64\], allowed: \[any, 6, any\]",
    ),
    "uneven groups": (
        {"num_key_value_heads": 3},
        "4 query heads are no multiple of 3 KV heads",
    ),
    "no heads": ({"num_heads": 0}, "both must be positive"),
    "KV heads of another count": (
        {"num_key_value_heads": 4},
        r"key has shape \[\d+, 128, 128\], allowed: \[any, any, 256\]",
    ),
    "no query lengths": (
        without("actual_seq_lengths"),
        "actual_seq_lengths must be given",
    ),
    "no key lengths": (
        without("actual_seq_lengths_kv"),
        "actual_seq_lengths_kv must be given",
    ),
    "lengths instead of ends": (
        {"actual_seq_lengths": [4, 2]},
        r"cumulative and not decrease: \[4, 2\]",
    ),
    "tokens without a sequence": (
        {"actual_seq_lengths": [2, 5]},
        "ends with 5, but there are 6 tokens",
    ),
    "a negative length": (
        {"actual_seq_lengths_kv": [-1, 4]},
        "has negative lengths",
    ),
    "lengths of other sequences": (
        {"actual_seq_lengths_kv": [4]},
        "2 lengths in actual_seq_lengths, 1 in",
    ),
    "blocks of 16": (
        {"block_size": 16},
        "block_size 16, allowed: multiples of 128 from 128 to 1024",
    ),
    "blocks too large": ({"block_size": 1152}, "block_size 1152, allowed"),
    "blocks unlike the cache's": (
        {"block_size": 256},
        r"key has shape \[\d+, 128, 128\], allowed: \[any, 256, any\]",
    ),
    "a block table of int64": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int64)},
        "block_table is torch.int64, allowed: torch.int32",
    ),
    "a block table with a row too many": (
        {"block_table": torch.zeros(3, 3, dtype=torch.int32)},
        r"block_table has shape \[3, 3\], allowed: \[2, any\]",
    ),
    "a block table too narrow": (
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
        "a sequence of 200 tokens needs 2 blocks of 128",
    ),
    "a block that does not exist": (
        {"block_table": torch.full((2, 2), 99, dtype=torch.int32)},
        r"block_table\[0\] is \[99, 99\], there are \d+ blocks: the device would read",
    ),
    "a negative block": (
        {"block_table": torch.full((2, 2), -1, dtype=torch.int32)},
        "the device would read outside",
    ),
    "no mask": (without("atten_mask"), "sparse_mode 3 needs an atten_mask"),
    "a mask in mode 0": ({"sparse_mode": 0}, "sparse_mode 0 takes no atten_mask"),
    "no mask in mode 2": (
        {"sparse_mode": 2, "atten_mask": None},
        "sparse_mode 2 needs an atten_mask",
    ),
    "a sliding window": ({"sparse_mode": 4}, "not emulated: sparse_mode 4"),
    "no mode": ({"sparse_mode": 5}, "no sparse_mode 5"),
    "a mask of the sequence's size": (
        {"atten_mask": CAUSAL_MASK[:512, :512]},
        r"atten_mask has shape \[512, 512\], allowed: \[2048, 2048\]",
    ),
    "a mask a sequence": (
        {"atten_mask": CAUSAL_MASK.expand(2, 2048, 2048)},
        r"allowed: \[1, 2048, 2048\]",
    ),
    "a mask of floats": (
        {"atten_mask": CAUSAL_MASK.bfloat16()},
        "atten_mask is torch.bfloat16, allowed: torch.bool, torch.int8, torch.uint8",
    ),
    "a precision that is none": ({"inner_precise": 4}, "inner_precise 4"),
    "quantization": ({"antiquant_mode": 1}, "not emulated: argument antiquant_mode"),
    "rope of MLA": (
        {"query_rope": torch.zeros(2, 2)},
        "not emulated: argument query_rope",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    changes, message = REFUSED[case]
    batch = Batch([(2, 200), (4, 4)], block_size=128)
    batch.arguments |= changes
    with pytest.raises(CannError, match=message) as raised:
        fused_infer_attention_score(*batch.tensors, **batch.arguments)
    start = "[emulated CANN] aclnnFusedInferAttentionScoreV3: "
    assert str(raised.value).startswith(start)
    assert isinstance(raised.value, NotEmulatedError) == ("not emulated" in message)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch([(2, 2)], head_size=80), "head size 80 in layout TND"),
        (Batch([(2, 2)], head_size=256), "head size 256"),
        (Batch([(2, 2)], dtype=torch.float32), "query is torch.float32, allowed"),
        (Batch([(1, 1)], heads=65, kv_heads=1), "65 query heads share a KV head"),
    ],
)
def test_refuses_what_no_layer_may_have(batch, message):
    with pytest.raises(CannError, match=message):
        fused_infer_attention_score(*batch.tensors, **batch.arguments)


def test_refuses_a_cache_row_beyond_the_reach_of_an_instruction():
    batch = Batch([(1, 1)], heads=512, kv_heads=512, head_size=128, block_size=128)
    with pytest.raises(CannError, match="take 65536 values a token in the cache"):
        fused_infer_attention_score(*batch.tensors, **batch.arguments)


def test_refuses_more_tokens_than_a_call_may_have():
    query = torch.empty(1, 1, 64, dtype=torch.bfloat16).expand((1 << 20) + 1, 1, 64)
    batch = Batch([(1, 1)], heads=1, kv_heads=1)
    with pytest.raises(CannError, match="1048577 query tokens"):
        fused_infer_attention_score(query, *batch.tensors[1:], **batch.arguments)


@pytest.mark.parametrize(
    ("position", "change", "message"),
    [
        (1, lambda key: key.half(), "types differ: query torch.bfloat16, key torch.fl"),
        (1, lambda key: key[:4], "actual_seq_lengths_kv ends with 6, but there are 4"),
        (1, lambda key: key.flatten(1), r"key has shape \[6, 128\]"),
        (2, lambda value: value[:4], r"value has shape \[4, 2, 64\], allowed: \[6, 2"),
        (0, lambda query: query.flatten(1), r"query has shape \[6, 256\]"),
    ],
)
def test_refuses_tensors_that_do_not_belong_together(position, change, message):
    batch = Batch([(2, 2), (4, 4)])
    tensors = list(batch.tensors)
    tensors[position] = change(tensors[position])
    with pytest.raises(CannError, match=message):
        fused_infer_attention_score(*tensors, **batch.arguments)


def test_refuses_a_cache_with_a_dimension_for_heads():
    """CANN would read ``[blocks, block_size, heads, size]`` as heads before tokens."""
    batch = Batch([(1, 1)], block_size=128)
    query, *caches = batch.tensors
    caches = [cache.unflatten(2, (2, 64)) for cache in caches]
    with pytest.raises(NotEmulatedError, match="a paged cache of 4 dimensions"):
        fused_infer_attention_score(query, *caches, **batch.arguments)


@pytest.mark.parametrize(
    ("name", "tensor", "flag", "message"),
    [
        ("attention_out", torch.empty(6, 256).bfloat16(), False, "attention_out has"),
        ("attention_out", torch.empty(6, 4, 64), False, "types differ"),
        ("softmax_lse", torch.empty(1), True, r"softmax_lse has shape \[1\], allowed"),
        ("softmax_lse", torch.empty(6, 4, 1).half(), True, "softmax_lse is torch.fl"),
    ],
)
def test_refuses_outputs_of_another_shape_or_type(name, tensor, flag, message):
    batch = Batch([(2, 2), (4, 4)])
    outputs = {
        "attention_out": torch.empty_like(batch.tensors[0]),
        "softmax_lse": torch.empty(1),
    } | {name: tensor}
    with pytest.raises(CannError, match=message):
        fused_infer_attention_score_out(
            *batch.tensors,
            **batch.arguments,
            out=list(outputs.values()),
            softmax_lse_flag=flag,
        )


def test_the_workspace_is_only_for_calls_that_would_run():
    batch = Batch([(2, 2)], head_size=80)
    with pytest.raises(CannError, match="head size 80"):
        workspace_of(batch)


def call_on(workspace: torch.Tensor, batch: Batch) -> None:
    fused_infer_attention_score_out(
        *batch.tensors,
        **batch.arguments,
        workspace=workspace,
        out=[torch.empty_like(batch.tensors[0]), torch.empty(1)],
    )


def workspace_of(batch: Batch) -> torch.Tensor:
    return fused_infer_attention_score_get_max_workspace(
        *batch.tensors, **batch.arguments
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 4), (3, 1), (6, 2)])
@pytest.mark.parametrize("lengths", [[(1, 9)] * 8, [(8, 8)], [(5, 60), (3, 3)]])
def test_a_wider_layer_does_not_fit_the_first_layers_workspace(
    heads, kv_heads, lengths
):
    """What the graph mode of vllm-ascend does to a model whose layers differ."""
    first = workspace_of(Batch([(1, 1)] * 8, heads=2, kv_heads=1))
    wider = Batch(lengths, heads, kv_heads)
    needed = attention_workspace_bytes(8, heads, kv_heads, 64, len(lengths))
    given = first.numel() * first.element_size()
    with pytest.raises(CannError, match=f"has {given} bytes, this call needs {needed}"):
        call_on(first, wider)
    call_on(workspace_of(wider), wider)


def test_a_byte_too_little_is_too_little():
    batch = Batch([(2, 2)])
    needed = attention_workspace_bytes(2, 4, 2, 64, 1)
    call_on(torch.empty(needed, dtype=torch.uint8), batch)
    with pytest.raises(CannError, match=f"has {needed - 1} bytes"):
        call_on(torch.empty(needed - 1, dtype=torch.uint8), batch)


def test_the_workspace_of_a_graph_fits_every_way_to_part_its_tokens():
    """A graph is captured with some sequences and replayed with others."""
    captured = workspace_of(Batch([(1, 1)] * 8))
    for lengths in ([(8, 8)], [(1, 300)] * 5 + [(3, 3)], [(2, 2)] * 4):
        call_on(captured, Batch(lengths))


def test_the_workspace_grows_with_everything():
    shape = (8, 4, 2, 64, 8)
    least = attention_workspace_bytes(*shape)
    for position in range(5):
        more = list(shape)
        more[position] += 1
        assert attention_workspace_bytes(*more) > least
