"""Writes into the paged KV cache land in their slots and nowhere else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend.emulator.contracts import CannError, NotEmulatedError
from ascend.emulator.kernels.kv_cache import reshape_and_cache, scatter_pa_kv_cache

BLOCKS, BLOCK_SIZE, HEADS, SIZE, VALUE_SIZE = 3, 16, 2, 32, 64
SLOTS = BLOCKS * BLOCK_SIZE


def tokens(count, size=SIZE, dtype=torch.bfloat16):
    numbers = torch.arange(count * HEADS * size).view(count, HEADS, size) % 251
    return numbers.to(dtype)


def caches(dtype=torch.bfloat16):
    """Fresh device memory is NaN."""
    return [
        torch.full((BLOCKS, BLOCK_SIZE, HEADS, size), torch.nan, dtype=dtype)
        for size in (SIZE, VALUE_SIZE)
    ]


def fractal_caches():
    return [
        torch.full((BLOCKS, HEADS * size // 16, BLOCK_SIZE, 16), torch.nan).bfloat16()
        for size in (SIZE, VALUE_SIZE)
    ]


def assert_written(cache, written, slots):
    """Token by token: what a slot holds is what was written to it, or NaN."""
    kept = {slot: i for i, slot in enumerate(slots) if slot >= 0}
    for slot in range(SLOTS):
        found = cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE]
        if slot in kept:
            assert torch.equal(found, written[kept[slot]])
        else:
            assert found.isnan().all()


some_slots = st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=20).flatmap(
    lambda slots: st.permutations(slots + [-1] * (len(slots) % 3))
)


@given(slots=some_slots)
def test_reshape_and_cache(slots):
    key, value = tokens(len(slots)), tokens(len(slots), VALUE_SIZE)
    key_cache, value_cache = caches()
    indices = torch.tensor(slots, dtype=torch.int32)
    assert reshape_and_cache(key, value, key_cache, value_cache, indices) is None
    assert_written(key_cache, key, slots)
    assert_written(value_cache, value, slots)


@given(
    slots=some_slots,
    mode=st.sampled_from([None, "Norm", "PA_NZ"]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_scatter(slots, mode, dtype):
    key, value = tokens(len(slots)), tokens(len(slots), VALUE_SIZE)
    pair = fractal_caches() if mode == "PA_NZ" else caches()
    indices = torch.tensor(slots, dtype=dtype)
    scatter_pa_kv_cache(key, value, *pair, indices, cache_mode=mode)
    for cache, written in zip(pair, (key, value), strict=True):
        if mode == "PA_NZ":  # the documentation's first scenario, undone
            shape = (BLOCKS, BLOCK_SIZE, HEADS, -1)
            cache = cache.transpose(1, 2).reshape(shape)
        assert_written(cache, written, slots)


def test_fractal_layout_is_the_default():
    pair = fractal_caches()
    slots = torch.tensor([17], dtype=torch.int32)
    scatter_pa_kv_cache(tokens(1), tokens(1, VALUE_SIZE), *pair, slots)
    assert torch.equal(pair[0][1, :, 1], tokens(1).view(4, 16))


def test_strided_tokens():
    """Views of the fused projection."""
    fused = tokens(3, SIZE + VALUE_SIZE)
    key, value = fused.split([SIZE, VALUE_SIZE], -1)
    key_cache, value_cache = caches()
    slots = [40, 2, 7]
    reshape_and_cache(
        key, value, key_cache, value_cache, torch.tensor(slots, dtype=torch.int32)
    )
    assert_written(key_cache, key, slots)
    assert_written(value_cache, value, slots)


def test_of_tokens_with_one_slot_the_last_wins():
    key_cache, value_cache = caches()
    slots = torch.zeros(5, dtype=torch.int32)
    reshape_and_cache(tokens(5), tokens(5, VALUE_SIZE), key_cache, value_cache, slots)
    assert_written(key_cache, tokens(5)[4:], [0])


def arguments(**changes):
    key_cache, value_cache = caches()
    return {
        "key": tokens(2),
        "value": tokens(2, VALUE_SIZE),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slots": torch.tensor([0, 1], dtype=torch.int32),
    } | changes


REFUSED = {
    "a slot past the cache": (
        {"slots": torch.tensor([0, SLOTS], dtype=torch.int32)},
        f"slot {SLOTS} is outside of the cache, which has {SLOTS} slots",
    ),
    "fewer slots than tokens": (
        {"slots": torch.zeros(1, dtype=torch.int32)},
        r"slots has shape \[1\], allowed: \[2\]",
    ),
    "slots of another type": (
        {"slots": torch.zeros(2, dtype=torch.int16)},
        "is torch.int16, allowed: torch.int32",
    ),
    "another type than the cache's": (
        {"key": tokens(2).half()},
        "types differ: key torch.float16",
    ),
    "flat tokens": (
        {"key": tokens(2).flatten(1)},
        r"key has shape \[2, 64\], allowed: \[any, any, any\]",
    ),
    "fewer values than keys": (
        {"value": tokens(1, VALUE_SIZE)},
        r"value has shape \[1, 2, 64\], allowed: \[2, 2, any\]",
    ),
    "a cache of other heads": (
        {"key_cache": torch.zeros(3, 16, 4, SIZE).bfloat16()},
        r"cache has shape \[3, 16, 4, 32\], allowed: \[any, any, 2, 32\]",
    ),
    "a cache that is a strided view": (
        {"key_cache": torch.zeros(3, 16, 4, SIZE).bfloat16()[:, :, :2]},
        "a cache must be contiguous",
    ),
}


def scatter(*positional):
    scatter_pa_kv_cache(*positional, cache_mode="Norm")


@pytest.mark.parametrize("write", [reshape_and_cache, scatter])
@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case, write):
    changes, message = REFUSED[case]
    with pytest.raises(CannError, match=message) as raised:
        write(*arguments(**changes).values())
    assert str(raised.value).startswith("[emulated CANN] ")


def test_atb_refuses_slots_of_int64():
    slots = torch.tensor([0, 1])
    with pytest.raises(CannError, match=r"is torch.int64, allowed: torch.int32$"):
        reshape_and_cache(*arguments(slots=slots).values())


def test_refuses_a_mode_that_is_none():
    with pytest.raises(CannError, match="cache_mode 'NZ', allowed"):
        scatter_pa_kv_cache(*arguments().values(), cache_mode="NZ")


def test_refuses_a_plain_cache_in_fractal_mode():
    with pytest.raises(CannError, match=r"allowed: \[any, 4, any, 16\]"):
        scatter_pa_kv_cache(*arguments().values())


def test_fractal_slots_past_the_cache():
    changes = dict(zip(("key_cache", "value_cache"), fractal_caches(), strict=True))
    changes["slots"] = torch.tensor([0, SLOTS])
    with pytest.raises(CannError, match=f"slot {SLOTS} is outside"):
        scatter_pa_kv_cache(*arguments(**changes).values())


@pytest.mark.parametrize("name", ["compress_lens", "compress_seq_offsets", "seq_lens"])
def test_compression_is_not_emulated(name):
    extra = {name: torch.zeros(2, dtype=torch.int32)}
    with pytest.raises(NotEmulatedError, match="compression"):
        scatter_pa_kv_cache(*arguments().values(), cache_mode="Norm", **extra)
