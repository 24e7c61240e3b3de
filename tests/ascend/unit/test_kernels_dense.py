"""Norms, SwiGLU, RoPE, LoRA, sampling and embedding against plain fp64 arithmetic."""

import pytest
import torch

from ascend.emulator.contracts import CannError
from ascend.emulator.kernels import (
    activation,
    embedding,
    format,
    lora,
    norm,
    rope,
    sampling,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def assert_rounded_once(
    got: torch.Tensor, exact: torch.Tensor, least: float = 0.05
) -> None:
    """Within the spacing of the dtype's numbers around each exact value.

    Values below ``least`` are what is left of larger ones, and as exact as those.

    Half of it is the rounding of the result; the rest is room for the fp32 steps
    before it, which move an exact value across a boundary now and then.
    """
    spacing = torch.finfo(got.dtype).eps * exact.abs().clamp(min=least)
    factor = 8 if got.dtype == torch.float32 else 1  # all of its steps are fp32's
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= factor * spacing).all()


def exact_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 3, 128), (5, 576)])
def test_rms_norm(shape, dtype):
    x = random(*shape, dtype=dtype)
    gamma = random(shape[-1], dtype=dtype, seed=1)
    got, rstd = norm.rms_norm(x, gamma, 1e-3)
    assert_rounded_once(got, exact_norm(x, gamma, 1e-3))
    exact = 1 / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert rstd.dtype == torch.float32
    assert_rounded_once(rstd, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_gives_the_sum_and_norms_it(dtype):
    x1, x2 = (random(9, 64, dtype=dtype, seed=seed) for seed in (0, 1))
    gamma, beta = (random(64, dtype=dtype, seed=seed) for seed in (2, 3))
    got, _, total = norm.add_rms_norm(x1, x2, gamma, 1e-6)
    assert total.equal(x1 + x2)
    assert_rounded_once(got, exact_norm(total, gamma, 1e-6))
    unbiased, _, _ = norm.add_rms_norm_bias(x1, x2, gamma)
    assert unbiased.equal(got)
    biased, _, _ = norm.add_rms_norm_bias(x1, x2, gamma, beta)
    assert biased.equal((got.float() + beta.float()).to(dtype))


def test_norms_refuse_what_does_not_fit():
    x, gamma = random(2, 64, dtype=torch.bfloat16), random(32, dtype=torch.bfloat16)
    with pytest.raises(CannError, match="gamma"):
        norm.rms_norm(x, gamma)
    with pytest.raises(CannError, match="types differ"):
        norm.add_rms_norm(x, x.float(), x[0])
    with pytest.raises(CannError, match="alike"):
        norm.add_rms_norm(x, x[:1], x[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_gates_with_the_first_half(dtype):
    x = random(5, 3, 96, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    assert_rounded_once(activation.swiglu(x), gate * torch.sigmoid(gate) * up)


def test_swiglu_refuses_an_odd_width():
    with pytest.raises(CannError, match="odd"):
        activation.swiglu(random(2, 5, dtype=torch.bfloat16))


def test_matmul_add_adds_in_place():
    x, weight = (random(3, 4, dtype=torch.float16, seed=seed) for seed in (0, 1))
    total = torch.ones(4, 4)
    activation.matmul_add_fp32(x, weight, total)
    assert_rounded_once(total, 1 + x.double().T @ weight.double())


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 128), (64, 32)])
def test_rope_turns_each_pair_as_a_complex_number(
    head_size, rotary_dim, dtype, is_neox
):
    positions = torch.tensor([3, 0, 7, 7])
    half = rotary_dim // 2
    angles = torch.arange(9)[:, None] * 100.0 ** -(torch.arange(half) / half)
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    tensors = [random(4, heads * head_size, dtype=dtype) for heads in (6, 2)]
    exact = [exact_rope(x, positions, cache, head_size, is_neox) for x in tensors]
    rope.rotary_embedding(positions, *tensors, head_size, cache, is_neox)
    for got, expected in zip(tensors, exact, strict=True):
        assert_rounded_once(got, expected, least=1.0)


def exact_rope(x, positions, cache, head_size, is_neox) -> torch.Tensor:
    cos, sin = cache[positions].double()[:, None].chunk(2, -1)
    half = cos.shape[-1]
    heads = x.double().view(len(x), -1, head_size).clone()
    index = torch.arange(half)
    first, second = (index, index + half) if is_neox else (2 * index, 2 * index + 1)
    turned = torch.complex(heads[..., first], heads[..., second])
    turned = turned * torch.complex(cos, sin)
    heads[..., first], heads[..., second] = turned.real, turned.imag
    return heads.view(x.shape)


def test_rope_refuses_positions_and_widths_that_do_not_fit():
    cache = random(8, 64, dtype=torch.bfloat16)
    x = random(1, 128, dtype=torch.bfloat16)
    with pytest.raises(CannError, match="position 8"):
        rope.rotary_embedding(torch.tensor([8]), x, x, 64, cache)
    with pytest.raises(CannError, match="no multiple"):
        rope.rotary_embedding(torch.tensor([1]), x, x[:, :100], 64, cache)
    with pytest.raises(CannError, match="positions is"):
        rope.rotary_embedding(torch.tensor([1], dtype=torch.int16), x, x, 64, cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lora_shrinks_and_expands_by_each_tokens_adapter(dtype):
    indices = torch.tensor([1, -1, 0, 1, 1])
    x = random(5, 32, dtype=dtype)
    a = random(2, 1, 8, 32, dtype=dtype, seed=1)
    b = random(2, 1, 16, 8, dtype=dtype, seed=2)
    shrunk = torch.zeros(5, 8)
    lora.bgmv_shrink(x, a, indices, shrunk, 0.5)
    y = random(5, 40, dtype=dtype, seed=3)
    expected = y.double()
    for token, adapter in enumerate(indices.tolist()):
        small = torch.zeros(8, dtype=torch.float64)
        if adapter >= 0:
            small = 0.5 * a[adapter, 0].double() @ x[token].double()
            expected[token, 4:20] += b[adapter, 0].double() @ shrunk[token].double()
        assert torch.allclose(shrunk[token].double(), small, atol=1e-5)
    assert lora.bgmv_expand(shrunk, b, indices, y, 4, 16) is y
    assert_rounded_once(y, expected)


def test_lora_by_sequences_is_lora_by_their_tokens():
    x, weight = (
        random(5, 32, dtype=torch.float16),
        random(2, 1, 8, 32, dtype=torch.half),
    )
    by_sequence, by_token = torch.zeros(5, 8), torch.zeros(5, 8)
    lora.sgmv_shrink(
        *(x, weight, torch.tensor([1, 0]), torch.tensor([3, 2])), by_sequence, 1.0
    )
    lora.bgmv_shrink(x, weight, torch.tensor([1, 1, 1, 0, 0]), by_token, 1.0)
    assert by_sequence.any()
    assert by_sequence.equal(by_token)


@pytest.mark.parametrize(("k", "p"), [(5, None), (None, 0.6), (7, 0.5), (None, 1e-9)])
def test_top_k_top_p_keeps_the_best(k, p):
    logits = random(4, 50, dtype=torch.float32)
    got = sampling.top_k_top_p(
        logits,
        None if p is None else torch.full((4,), p),
        None if k is None else torch.full((4,), k),
    )
    for row, filtered in zip(logits.double(), got, strict=True):
        order = row.argsort(descending=True)[:k]
        before = row[order].softmax(-1).cumsum(-1) - row[order].softmax(-1)
        kept = order if p is None else order[before < p]
        assert set(filtered.isfinite().nonzero()[:, 0].tolist()) == set(kept.tolist())
        assert filtered[kept].equal(row[kept].float())


def test_embedding_masks_ids_of_other_ranks():
    ids = torch.tensor([9, 10, 19, 20, 99, 100, 103, 104])
    rows, masked = embedding.get_masked_input_and_mask(ids, 10, 20, 6, 100, 104)
    assert masked.tolist() == [True, False, False, True, True, False, False, True]
    # Ten original rows, six of padding, then the added ones.
    assert rows[~masked].tolist() == [0, 9, 16, 19]
    assert rows[masked].tolist() == [0] * 4


def test_formats_are_all_plain():
    x = random(2, 2, dtype=torch.float32)
    assert format.format_cast(x, 29) is x
    assert format.format_cast_(x, 29) is x
    assert format.get_npu_format(x) == format.ND
