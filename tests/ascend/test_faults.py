"""Mistakes seeded into the emulator are caught by the comparisons of this suite."""

from pathlib import Path

import pytest
import torch

from ascend.emulator.faults import FAULTS
from ascend.test_graphs import EQUAL as CONFIG
from ascend.test_server import FLAGS, complete
from support.ascend import (
    assert_answer_bf16_close,
    assert_bf16_close,
    openelm_reference,
    run_on_npu,
)
from support.checkpoints import random_prompt, write_openelm_checkpoint
from support.engine import EngineError, Round
from support.server import serve
from support.tokenizers import write_llama_tokenizer

PROMPTS = [random_prompt(CONFIG, length) for length in (17, 140)]
FULL = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]}


def run_and_compare(path: Path, fault: str, **engine_args) -> None:
    tensors = write_openelm_checkpoint(path, CONFIG, dtype=torch.bfloat16)
    env = {"NPU_EMULATOR_FAULT": fault}
    [result] = run_on_npu(
        *(path, [Round(PROMPTS, 4)]), env=env, max_model_len=256, **engine_args
    )
    reference = openelm_reference(CONFIG, tensors)
    assert_bf16_close(reference, PROMPTS, result.completions)


def test_the_comparison_lets_the_faultless_pass(tmp_path: Path):
    run_and_compare(tmp_path, "none")


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"workspace"}))
def test_a_fault_of_a_kernel_shows_in_the_logits(tmp_path: Path, fault: str):
    with pytest.raises(AssertionError, match="times as far"):
        run_and_compare(tmp_path, fault)


def test_a_workspace_that_is_too_small_ends_the_engine(tmp_path: Path):
    with pytest.raises(EngineError, match="write past its end"):
        run_and_compare(tmp_path, "workspace", compiled=True, compilation_config=FULL)


def test_a_dropped_all_reduce_shows_in_the_answers(tmp_path: Path):
    tensors = write_openelm_checkpoint(tmp_path, CONFIG, dtype=torch.bfloat16)
    write_llama_tokenizer(tmp_path)
    env = {"NPU_EMULATOR_FAULT": "all_reduce"}
    with serve(tmp_path, *FLAGS, "--tensor-parallel-size", "2", env=env) as running:
        answer = complete(running, PROMPTS[0])
    reference = openelm_reference(CONFIG, tensors)
    with pytest.raises(AssertionError, match="times as far"):
        assert_answer_bf16_close(reference, PROMPTS[0], answer)
