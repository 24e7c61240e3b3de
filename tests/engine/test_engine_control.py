"""The engine itself on layers that differ, which is what our OpenELM stands on.

One batch of nine prompts, so that decodes and prefills share steps and threads share
the KV cache: there vLLM 0.23's CPU attention goes wrong if the ratio of query to KV
heads changes from layer to layer, unless the package sets it right.
"""

import json
from pathlib import Path

import pytest

from support.checkpoints import (
    TINY,
    openelm_config,
    random_prompt,
    write_openelm_checkpoint,
)
from support.compare import assert_completions_close
from support.engine import EngineError, Round, engine_version, run_engine
from support.reference import Config

LENGTHS = [1, 2, 17, 64, 129, 257, 400, 650, 900]


def layout(num_query_heads: list[int], num_kv_heads: list[int]) -> Config:
    return openelm_config(
        model_dim=256,
        head_dim=64,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        ffn_multipliers=[1.0] * len(num_query_heads),
    )


UNIFORM = layout([12, 12, 12, 12], [3, 3, 3, 3])
CONSTANT_RATIO = layout([12, 12, 16, 20], [3, 3, 4, 5])
CHANGING_RATIO = layout([4, 8, 16, 32], [2, 2, 2, 8])


def nine_prompts(config: Config) -> list[list[int]]:
    return [random_prompt(config, length) for length in LENGTHS]


# A user's own setting: to be kept where it does no harm, and it does none here.
SPLIT_KV = {"VLLM_CPU_ATTN_SPLIT_KV": "1"}


@pytest.mark.parametrize(
    ("config", "env"),
    [(UNIFORM, {}), (CONSTANT_RATIO, SPLIT_KV), (CHANGING_RATIO, {})],
    ids=["uniform", "constant ratio", "changing ratio"],
)
def test_engine_attends_rightly_with_these_heads(
    config: Config, env: dict[str, str], tmp_path: Path
):
    tensors = write_openelm_checkpoint(tmp_path, config)
    prompts = nine_prompts(config)
    rounds = [Round(prompts, 24)]
    (result,) = run_engine(tmp_path, rounds, max_model_len=1024, env=env)
    assert_completions_close(config, tensors, prompts, result.completions)


def test_a_split_that_would_make_the_engine_wrong_is_refused(tmp_path: Path):
    if engine_version() != (0, 23):
        pytest.skip(
            "only vLLM 0.23 is wrong with VLLM_CPU_ATTN_SPLIT_KV=1; on others the "
            "test of a changing ratio runs with whatever they split"
        )
    write_openelm_checkpoint(tmp_path, CHANGING_RATIO)
    with pytest.raises(EngineError, match=r"VLLM_CPU_ATTN_SPLIT_KV=1: .*wrong results"):
        run_engine(tmp_path, [Round([[1]])], max_model_len=1024, env=SPLIT_KV)


@pytest.fixture
def arch_convertor(tmp_path: Path):
    from vllm_ascend_models import register

    register()
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
    )

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = get_config(str(tmp_path), trust_remote_code=False)
    return MODEL_ARCH_CONFIG_CONVERTORS["openelm"](config, config.get_text_config())


def test_engine_is_told_of_the_widest_layer_in_integers(arch_convertor):
    told = arch_convertor.convert()
    assert (told.total_num_attention_heads, told.total_num_kv_heads) == (12, 3)
    assert type(told.total_num_attention_heads) is type(told.total_num_kv_heads) is int
    assert (told.head_size, told.hidden_size) == (32, 128)
    assert told.total_num_hidden_layers == 4


def test_engine_that_can_hear_of_each_layer_is_told(arch_convertor):
    if engine_version() < (0, 32):
        pytest.skip("vLLM asks for each layer's configuration from 0.32 on only")
    told = arch_convertor.convert()
    layers = [told[i] for i in range(4)]
    assert [layer.total_num_attention_heads for layer in layers] == [4, 8, 8, 12]
    assert [layer.total_num_kv_heads for layer in layers] == [1, 2, 2, 3]
