"""Llama 3.1's geometry and RoPE scaling on the real vllm-ascend."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from support.ascend import assert_bf16_close, llama_reference, run_on_npu
from support.engine import Round, RoundResult
from support.llama import write_llama_checkpoint


def prompt(length: int) -> list[int]:
    return [1, *(3 + (7919 * i + length) % 500 for i in range(length - 1))]


ROUNDS = [
    Round([prompt(length) for length in (1, 17, 129, 1025)], 8, prompt_logits=True),
    # Beyond 8192 positions, which is where the scaling of RoPE begins to count.
    Round([prompt(8300)], 4),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama31")
    write_llama_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def results(checkpoint: Path) -> list[RoundResult]:
    env = {"NPU_EMULATOR_LAUNCH_LOG": str(checkpoint / "launches")}
    return run_on_npu(checkpoint, ROUNDS, env=env, max_model_len=9000)


@pytest.mark.parametrize("index", [0, 1], ids=["short", "past 8192"])
def test_logits_are_right(checkpoint: Path, results: list[RoundResult], index: int):
    assert_bf16_close(
        llama_reference(checkpoint), ROUNDS[index].prompts, results[index].completions
    )


@pytest.mark.skipif("NPU_EMULATOR_LIB" not in os.environ, reason="the emulator's log")
def test_rope_is_one_kernel_a_layer(checkpoint: Path, results: list[RoundResult]):
    # A file for each process, and vLLM looks at a model's class in one of its own.
    logs = (checkpoint / "launches").iterdir()
    lines = (line for log in logs for line in log.read_text().splitlines())
    kernels = Counter(json.loads(line)["name"] for line in lines)
    attention = kernels["npu::npu_fused_infer_attention_score"]
    assert kernels["atb::_npu_rotary_embedding"] >= attention > 0
