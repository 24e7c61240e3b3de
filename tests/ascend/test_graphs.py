"""Compiled, with ACL graphs captured and replayed, on the real vllm-ascend."""

from pathlib import Path

import pytest
import torch

from support.ascend import assert_bf16_close, openelm_reference, run_on_npu
from support.checkpoints import openelm_config, random_prompt, write_openelm_checkpoint
from support.engine import EngineError, Round
from support.reference import Config


def layers(heads: list[int]) -> Config:
    """An OpenELM with these query heads, two for each KV head."""
    return openelm_config(
        model_dim=256,
        head_dim=64,
        num_query_heads=heads,
        num_kv_heads=[q // 2 for q in heads],
        ffn_multipliers=[0.5, 4.0],
    )


EQUAL, DIFFERENT = layers([8, 8]), layers([4, 12])


def assert_right_in_graphs(path: Path, config: Config, mode: str | None) -> None:
    """Answer in the graph mode given, or in the default one, and compare."""
    tensors = write_openelm_checkpoint(path, config, dtype=torch.bfloat16)
    # Sizes around those that graphs are captured for, so that some are padded.
    prompts = [random_prompt(config, length) for length in (1, 17, 129)]
    compilation: dict = {"cudagraph_capture_sizes": [1, 2, 4, 8, 128]}
    if mode is not None:
        compilation["cudagraph_mode"] = mode
    rounds = [Round(prompts, 8), Round(prompts[:1], 8)]
    results = run_on_npu(
        path, rounds, compiled=True, max_model_len=512, compilation_config=compilation
    )
    reference = openelm_reference(config, tensors)
    for round_, result in zip(rounds, results, strict=True):
        assert_bf16_close(reference, round_.prompts, result.completions)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_DECODE_ONLY"])
def test_equal_layers_are_right_in_graphs(tmp_path: Path, mode: str):
    assert_right_in_graphs(tmp_path, EQUAL, mode)


def test_layers_that_differ_are_right_in_the_default_graphs(tmp_path: Path):
    assert_right_in_graphs(tmp_path, DIFFERENT, None)


def test_full_graphs_need_a_workspace_for_the_widest_layer(tmp_path: Path):
    # What the policy keeps people from: a device would write past the first layer's
    # workspace, the emulator refuses it.
    with pytest.raises(EngineError, match="workspace"):
        assert_right_in_graphs(tmp_path, DIFFERENT, "FULL_DECODE_ONLY")
