"""The fused attention kernel against plain fp64 attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend.emulator.kernels.attention import (
    fused_infer_attention_score,
    fused_infer_attention_score_get_max_workspace,
    fused_infer_attention_score_out,
)
from ascend.unit.attention_batch import CAUSAL_MASK, Batch, assert_rounded_once


def assert_right(batch: Batch) -> None:
    out, lse = fused_infer_attention_score(
        *batch.tensors, **batch.arguments, softmax_lse_flag=True
    )
    expected, expected_lse = batch.expected()
    assert out.dtype == batch.dtype
    assert_rounded_once(out, expected)
    assert lse.shape == (*out.shape[:2], 1)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse[..., 0].double(), expected_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 128, 192])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (8, 2), (6, 1), (64, 1)])
def test_grouped_heads_of_every_size(heads, kv_heads, head_size, dtype):
    assert_right(Batch([(5, 5), (9, 9)], heads, kv_heads, head_size, dtype))


@pytest.mark.parametrize("block_size", [0, 128, 1024])
@pytest.mark.parametrize("sparse_mode", [0, 2, 3])
def test_prefill_decode_and_chunks_in_one_batch(sparse_mode, block_size):
    lengths = [(1, 300), (200, 200), (1, 1), (130, 260), (64, 129), (3, 128)]
    assert_right(Batch(lengths, sparse_mode=sparse_mode, block_size=block_size))


@pytest.mark.parametrize("block_size", [0, 128])
@pytest.mark.parametrize("sparse_mode", [0, 2, 3])
def test_padding_of_graphs_is_zeros(sparse_mode, block_size):
    """Sequences without keys, without queries, and with more queries than keys."""
    lengths = [(1, 70), (1, 0), (0, 0), (0, 5), (100, 1), (70, 68), (4, 0)]
    batch = Batch(lengths, sparse_mode=sparse_mode, block_size=block_size)
    assert_right(batch)
    out, _ = fused_infer_attention_score(*batch.tensors, **batch.arguments)
    assert not out[1].any()
    assert not out[-4:].any()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 150), st.integers(0, 300)), min_size=1, max_size=4
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_size=st.sampled_from([64, 128]),
    sparse_mode=st.sampled_from([0, 2, 3]),
    block_size=st.sampled_from([0, 128, 256]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_any_batch(lengths, kv_heads, group, head_size, sparse_mode, block_size, dtype):
    assert_right(
        Batch(
            *(lengths, kv_heads * group, kv_heads, head_size),
            *(dtype, sparse_mode, block_size),
        )
    )


@pytest.mark.parametrize("block_size", [0, 128])
def test_as_many_kv_heads_as_query_heads_is_the_default(block_size):
    batch = Batch([(7, 7)], heads=2, kv_heads=2, block_size=block_size)
    batch.arguments["num_key_value_heads"] = 0
    assert_right(batch)


@pytest.mark.parametrize("shape", [(1, 2048, 2048), (1, 1, 2048, 2048)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks_of_other_types_and_dimensions(shape, dtype):
    batch = Batch([(70, 90)])
    batch.arguments["atten_mask"] = CAUSAL_MASK.to(dtype).view(shape)
    assert_right(batch)


def test_strided_queries():
    """A query that is a view of the fused projection, as before a rope in place."""
    batch = Batch([(70, 90)])
    query, *caches = batch.tensors
    fused = torch.cat([query, query], 1)
    out, _ = fused_infer_attention_score(fused[:, :4], *caches, **batch.arguments)
    assert out.is_contiguous()
    assert_rounded_once(out, batch.expected()[0])


def test_the_masks_content_counts():
    batch = Batch([(20, 20)])
    batch.arguments["atten_mask"] = torch.zeros_like(CAUSAL_MASK)
    out, _ = fused_infer_attention_score(*batch.tensors, **batch.arguments)
    assert_rounded_once(out, Batch([(20, 20)], sparse_mode=0).expected()[0])


def test_a_read_past_the_end_of_a_sequence_shows():
    batch = Batch([(1, 100), (1, 50)], block_size=128)
    batch.arguments["actual_seq_lengths_kv"] = [101, 50]
    out, _ = fused_infer_attention_score(*batch.tensors, **batch.arguments)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_without_its_flag_the_sum_is_one_zero():
    batch = Batch([(2, 2)])
    _, lse = fused_infer_attention_score(*batch.tensors, **batch.arguments)
    assert lse.tolist() == [0]


def test_the_out_form_writes_into_what_it_is_given():
    batch = Batch([(3, 40), (1, 1)], block_size=128)
    workspace = fused_infer_attention_score_get_max_workspace(
        *batch.tensors, **batch.arguments
    )
    attention_out = torch.full_like(batch.tensors[0], torch.nan)
    dummy = torch.full((1,), 7, dtype=batch.dtype)
    out, lse = fused_infer_attention_score_out(
        *batch.tensors,
        **batch.arguments,
        workspace=workspace,
        out=[attention_out, dummy],
    )
    assert out is attention_out
    assert lse is dummy
    assert dummy.item() == 7
    assert_rounded_once(out, batch.expected()[0])

    sums = torch.empty(4, 4, 1)
    fused_infer_attention_score_out(
        *batch.tensors,
        **batch.arguments,
        out=[attention_out, sums],
        softmax_lse_flag=True,
    )
    torch.testing.assert_close(
        sums[..., 0].double(), batch.expected()[1], rtol=1e-6, atol=2e-6
    )
