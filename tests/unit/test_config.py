"""`OpenELMConfig`: what it accepts, what it derives, and how it says no."""

import json
import math
import pickle
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="needs transformers")
from transformers import AutoConfig

from vllm_ascend_models.openelm.config import OpenELMConfig

APPLE = {
    "activation_fn_name": "swish",
    "architectures": ["OpenELMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_openelm.OpenELMConfig"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "ffn_dim_divisor": 256,
    "ffn_multipliers": [0.5, 1.0, 2.97, 4.0],
    "ffn_with_glu": True,
    "head_dim": 32,
    "initializer_range": 0.02,
    "max_context_length": 2048,
    "model_dim": 128,
    "model_type": "openelm",
    "normalization_layer_name": "rms_norm",
    "normalize_qk_projections": True,
    "num_gqa_groups": 4,
    "num_kv_heads": [1, 2, 2, 3],
    "num_query_heads": [4, 8, 8, 12],
    "num_transformer_layers": 4,
    "qkv_multipliers": [0.5, 1.0],
    "rope_freq_constant": 10000,
    "rope_max_length": 4096,
    "share_input_output_layers": True,
    "torch_dtype": "float32",
    "transformers_version": "4.39.3",
    "use_cache": True,
    "vocab_size": 512,
}


def test_apples_file_is_read_as_it_is_and_names_vllm_reads_are_in_to_dict():
    config = OpenELMConfig(**APPLE)
    saved = config.to_dict()
    assert {k: saved[k] for k in APPLE if k in ("num_query_heads", "use_cache")} == {
        "num_query_heads": [4, 8, 8, 12],
        "use_cache": True,
    }
    assert {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000},
        "rms_norm_eps": 1e-6,
    }.items() <= saved.items()
    widths = [layer.intermediate_size for layer in config.layer_geometry()]
    assert widths == [256, 256, 512, 512]


def test_a_config_survives_to_dict_json_and_pickle():
    config = OpenELMConfig(**APPLE)
    assert OpenELMConfig(**config.to_dict()).to_dict() == config.to_dict()
    from_json = OpenELMConfig(**json.loads(config.to_json_string()))
    assert from_json.to_dict() == config.to_dict()
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()


def test_saved_and_loaded_again_it_is_the_same(tmp_path):
    config = OpenELMConfig(**APPLE)
    config.save_pretrained(tmp_path)
    AutoConfig.register("openelm", OpenELMConfig, exist_ok=True)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, OpenELMConfig)
    assert again.layer_geometry() == config.layer_geometry()
    assert again.rope_parameters == config.rope_parameters


def test_a_pickled_config_arrives_in_a_fresh_process(tmp_path):
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(OpenELMConfig(**APPLE)))
    code = (
        "import pickle, pathlib, sys; "
        "c = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); "
        "print(type(c).__name__, c.num_query_heads)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "config.pickle")],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.split(maxsplit=1) == ["OpenELMConfig", "[4, 8, 8, 12]\n"]


def test_head_lists_are_derived_when_absent():
    keys = {k: v for k, v in APPLE.items() if k not in ("num_query_heads",)}
    del keys["num_kv_heads"]
    config = OpenELMConfig(**keys)
    assert config.num_query_heads == [4, 4, 4, 4]
    assert config.num_kv_heads == [1, 1, 1, 1]
    halved = OpenELMConfig(**keys | {"num_query_heads": [4, 8, 8, 12]})
    assert halved.num_kv_heads == [1, 2, 2, 3]


def test_one_number_gives_every_layer_the_same_multiplier():
    config = OpenELMConfig(**APPLE | {"ffn_multipliers": 2.0})
    assert {layer.intermediate_size for layer in config.layer_geometry()} == {256}


def test_rope_parameters_of_transformers_5_are_kept():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert OpenELMConfig(**APPLE | {"rope_parameters": rope}).rope_parameters == rope


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_query_heads", [4, 8, 8]),
        ("num_query_heads", [4, 8, 8, "12"]),
        ("num_query_heads", [4, 8, 8, 0]),
        ("num_query_heads", 8),
        ("num_kv_heads", [1, 2, 2, 3, 3]),
        ("num_kv_heads", [1, 2, 2, -3]),
        ("num_kv_heads", [1, 2, True, 3]),
        ("num_query_heads", [4, 8, 8, 13]),
        ("ffn_multipliers", [0.5, 1.0, 2.97]),
        ("ffn_multipliers", [0.5, 1.0, math.nan, 4.0]),
        ("ffn_multipliers", [0.5, 1.0, math.inf, 4.0]),
        ("ffn_multipliers", [0.5, 1.0, -1.0, 4.0]),
        ("ffn_multipliers", "4.0"),
        ("ffn_multipliers", math.nan),
        ("qkv_multipliers", [0.5, math.nan]),
        ("qkv_multipliers", []),
        ("activation_fn_name", "gelu"),
        ("normalization_layer_name", "layer_norm"),
        ("ffn_with_glu", False),
        ("ffn_with_glu", 1),
        ("normalize_qk_projections", "yes"),
        ("share_input_output_layers", None),
        ("head_dim", 33),
        ("head_dim", 0),
        ("model_dim", 128.0),
        ("model_dim", -128),
        ("num_transformer_layers", 0),
        ("num_transformer_layers", True),
        ("num_gqa_groups", 0),
        ("ffn_dim_divisor", 0),
        ("vocab_size", 0),
        ("vocab_size", "512"),
        ("max_context_length", 0),
        ("rope_max_length", -1),
        ("rope_freq_constant", 0),
        ("rope_freq_constant", math.inf),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", math.nan),
    ],
)
def test_a_bad_value_is_an_error_that_names_its_field(field, value):
    with pytest.raises(ValueError, match=rf"`{field}(\[\d\])?` is"):
        OpenELMConfig(**APPLE | {field: value})


def test_groups_that_do_not_divide_the_query_heads_are_named():
    keys = {k: v for k, v in APPLE.items() if k != "num_kv_heads"}
    with pytest.raises(ValueError, match=r"num_query_heads\[0\].*num_gqa_groups"):
        OpenELMConfig(**keys | {"num_gqa_groups": 3})
