"""Strict weights: the first tensor that is wrong is named, with what was expected."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("vllm", reason="reads headers with vLLM's parser")
from safetensors.torch import save_file  # noqa: E402

from vllm_ascend_models.openelm.checkpoint import (  # noqa: E402
    check_headers,
    check_weights,
    expected_tensors,
)
from vllm_ascend_models.openelm.config import OpenELMConfig  # noqa: E402

QKV = "transformer.layers.1.attn.qkv_proj.weight"


@pytest.fixture
def config():
    return OpenELMConfig(
        model_dim=64,
        head_dim=32,
        num_transformer_layers=2,
        num_query_heads=[2, 4],
        num_kv_heads=[1, 2],
        ffn_multipliers=[1.0, 2.0],
        ffn_dim_divisor=64,
        vocab_size=96,
        normalize_qk_projections=True,
        share_input_output_layers=True,
    )


@pytest.fixture
def tensors(config):
    return {name: torch.ones(shape) for name, shape in expected_tensors(config).items()}


def drain(tensors, config):
    return dict(check_weights(tensors.items(), config))


def test_a_whole_checkpoint_passes_unchanged(config, tensors, tmp_path):
    loaded = drain(tensors, config)
    assert loaded.keys() == tensors.keys()
    assert all(loaded[name] is tensors[name] for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    check_headers(tmp_path, config)


def missing(tensors):
    del tensors[QKV]


def extra(tensors):
    tensors["transformer.layers.2.attn.qkv_proj.weight"] = torch.ones(2, 2)


def misshapen(tensors):
    tensors[QKV] = torch.ones(255, 64)


SPOILED = [
    (missing, rf"lacks tensor `{QKV}` \[256, 64\]"),
    (extra, r"`transformer\.layers\.2\.attn\.qkv_proj\.weight` \[2, 2\].*no place"),
    (misshapen, rf"`{QKV}` .*shape \[255, 64\].*asks for \[256, 64\]"),
]


@pytest.mark.parametrize(("spoil", "said"), SPOILED)
def test_a_spoiled_checkpoint_stops_the_load(config, tensors, spoil, said):
    spoil(tensors)
    with pytest.raises(ValueError, match=said):
        drain(tensors, config)


@pytest.mark.parametrize(("spoil", "said"), SPOILED)
def test_a_spoiled_checkpoint_is_refused_by_its_headers(
    config, tensors, tmp_path, spoil, said
):
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        check_headers(tmp_path, config)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_value_that_is_not_finite_stops_the_load(config, tensors, value, dtype):
    tensors[QKV] = tensors[QKV].to(dtype)
    tensors[QKV][-1, -1] = value
    with pytest.raises(ValueError, match=rf"`{QKV}` .*1 values that are NaN"):
        drain(tensors, config)


def test_large_finite_values_whose_sum_overflows_are_loaded(config, tensors):
    tensors[QKV].fill_(3e38)
    assert drain(tensors, config).keys() == tensors.keys()


def test_a_file_cut_short_is_named_with_the_tensor(config, tensors, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors is cut short inside"):
        check_headers(tmp_path, config)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0not json", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_is_named(config, tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        check_headers(tmp_path, config)


def test_pickled_weights_alone_are_refused(config, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        check_headers(tmp_path, config)


def test_shards_are_checked_together(config, tensors, tmp_path):
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[:5]}, tmp_path / "model-1.safetensors")
    with pytest.raises(ValueError, match=r"lacks tensor .*, and 12 more"):
        check_headers(tmp_path, config)
    save_file({n: tensors[n] for n in names[5:]}, tmp_path / "model-2.safetensors")
    check_headers(tmp_path, config)


def test_a_head_that_a_fine_tune_added_unties_the_model(config, tensors, tmp_path):
    tensors["lm_head.weight"] = torch.ones(96, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    check_headers(tmp_path, config)
    assert config.tie_word_embeddings is False
    assert drain(tensors, config).keys() == tensors.keys()


def test_an_untied_model_needs_its_head(config, tensors):
    config.tie_word_embeddings = False
    with pytest.raises(ValueError, match=r"lacks tensor `lm_head\.weight` \[96, 64\]"):
        drain(tensors, config)
