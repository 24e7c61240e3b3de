"""ATB's attention operators against plain fp64 attention."""

import pytest
import torch

from ascend.emulator.contracts import CannError, NotEmulatedError
from ascend.emulator.kernels.attention_atb import (
    flash_attention,
    paged_attention,
    paged_attention_get_workspace,
)
from ascend.unit.attention_batch import Batch, assert_rounded_once

DECODES = [(1, 300), (1, 1), (1, 128), (1, 0)]
PROMPTS = [(5, 5), (150, 150), (1, 1)]


def paged_arguments(batch, **changes):
    query, *caches = batch.tensors
    shape = (batch.kv_heads, batch.head_size)
    key_cache, value_cache = (cache.unflatten(2, shape) for cache in caches)
    lengths = [length for _, length in batch.lengths]
    return {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "num_kv_heads": batch.kv_heads,
        "num_heads": batch.heads,
        "scale_value": batch.head_size**-0.5,
        "block_table": batch.arguments["block_table"],
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
        "out": torch.full_like(query, torch.nan),
    } | changes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (8, 1)])
def test_paged_attention(heads, kv_heads, dtype):
    batch = Batch(DECODES, heads, kv_heads, dtype=dtype, block_size=128)
    arguments = paged_arguments(batch)
    workspace = paged_attention_get_workspace(**arguments)
    assert paged_attention(**arguments, workspace=workspace) is None
    assert_rounded_once(arguments["out"], batch.expected()[0])


def test_paged_attention_leaves_padding_alone():
    batch = Batch([(1, 9)] * 3, block_size=128)
    arguments = paged_arguments(batch)
    arguments["context_lens"] = arguments["context_lens"][:2]
    arguments["block_table"] = arguments["block_table"][:2]
    paged_attention(**arguments)
    assert_rounded_once(arguments["out"][:2], batch.expected()[0][:2])
    assert arguments["out"][2].isnan().all()


def test_paged_attention_refuses_a_narrower_layers_workspace():
    narrow = Batch(DECODES, heads=2, kv_heads=1, block_size=128)
    workspace = paged_attention_get_workspace(**paged_arguments(narrow))
    wide = paged_arguments(Batch(DECODES, block_size=128))
    with pytest.raises(CannError, match=r"the workspace has \d+ bytes, this call nee"):
        paged_attention(**wide, workspace=workspace)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_lens": torch.ones(4).long()}, "context_lens is torch.int64"),
        ({"context_lens": torch.ones(5).int()}, "5 context_lens, but only 4 query"),
        ({"context_lens": -torch.ones(4).int()}, "context_lens has negative lengths"),
        ({"block_table": torch.zeros(4, 2).long()}, "block_table is torch.int64"),
        ({"block_table": torch.zeros(4, 2).int()}, "of 300 tokens needs 3 blocks"),
        ({"block_table": torch.full((4, 3), 99).int()}, "there are 8 blocks"),
        ({"num_heads": 6}, r"query has shape \[4, 4, 64\]"),
        ({"num_kv_heads": 3}, "4 query heads are no multiple of 3 KV heads"),
        ({"num_kv_heads": 4}, r"key_cache has shape \[8, 128, 2, 64\]"),
        ({"value_cache": torch.ones(8, 128, 2, 32).bfloat16()}, "value_cache has"),
        ({"out": torch.ones(4, 256).bfloat16()}, r"out has shape \[4, 256\]"),
        ({"out": torch.ones(4, 4, 64)}, "types differ: .*out torch.float32"),
    ],
)
def test_paged_attention_refuses(changes, message):
    arguments = paged_arguments(Batch(DECODES, block_size=128), **changes)
    with pytest.raises(CannError, match=message):
        paged_attention(**arguments)


def flash_arguments(batch, **changes):
    query, key, value = batch.tensors
    lengths = torch.tensor([length for length, _ in batch.lengths], dtype=torch.int32)
    # As vllm-ascend's `_generate_attn_mask` makes them.
    hidden = -torch.inf if batch.dtype == torch.float16 else 1
    later = torch.ones(160, 160, dtype=torch.bool).triu(1)
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": torch.zeros(160, 160, dtype=batch.dtype).masked_fill(later, hidden),
        "seq_len": lengths,
        "scale_value": batch.head_size**-0.5,
        "num_heads": batch.heads,
        "num_kv_heads": batch.kv_heads,
        "out": torch.full_like(query, torch.nan),
    } | changes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention(dtype):
    batch = Batch(PROMPTS, dtype=dtype)
    arguments = flash_arguments(batch)
    assert flash_attention(**arguments) is None
    assert_rounded_once(arguments["out"], batch.expected()[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": torch.tensor([5, 150, 1])}, "seq_len is torch.int64"),
        (
            {"seq_len": torch.tensor([5, 150]).int()},
            "adds up to 155, but",
        ),
        ({"mask": torch.zeros(149, 149).bfloat16()}, "smaller than a sequence of 150"),
        ({"num_kv_heads": 1}, r"key has shape \[156, 2, 64\], allowed: \[156, 1, 64\]"),
        ({"num_heads": 2}, r"query has shape \[156, 4, 64\]"),
        ({"num_kv_heads": 3}, "4 query heads are no multiple of 3 KV heads"),
        ({"value": torch.ones(156, 2, 32).bfloat16()}, "value has shape"),
        ({"out": torch.ones(156, 256).bfloat16()}, "out has shape"),
        ({"key": torch.ones(156, 2, 64)}, "types differ"),
    ],
)
def test_flash_attention_refuses(changes, message):
    with pytest.raises(CannError, match=message):
        flash_attention(**flash_arguments(Batch(PROMPTS), **changes))


def test_the_310ps_fractal_mask_is_not_emulated():
    mask = torch.zeros(1, 10, 160, 16).bfloat16()
    with pytest.raises(NotEmulatedError, match="a mask of 4 dimensions"):
        flash_attention(**flash_arguments(Batch(PROMPTS), mask=mask))


def test_there_is_no_fp32():
    with pytest.raises(CannError, match=r"query is torch.float32, allowed"):
        flash_attention(**flash_arguments(Batch(PROMPTS, dtype=torch.float32)))
    batch = Batch(DECODES, dtype=torch.float32, block_size=128)
    with pytest.raises(CannError, match=r"query is torch.float32, allowed"):
        paged_attention(**paged_arguments(batch))
