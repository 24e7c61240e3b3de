"""Compiled, with ACL graphs captured and replayed, on the real vllm-ascend."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from vllm import EngineArgs

from support.ascend import assert_bf16_close, openelm_reference, run_on_npu
from support.checkpoints import openelm_config, random_prompt, write_openelm_checkpoint
from support.engine import Round
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
MODES = [None, "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"]


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [EQUAL, DIFFERENT], ids=["equal", "different"])
def test_logits_are_right_in_graphs(tmp_path: Path, config: Config, mode: str | None):
    assert_right_in_graphs(tmp_path, config, mode)


def test_full_graphs_of_an_older_vllm_ascend_are_refused(tmp_path: Path):
    write_openelm_checkpoint(tmp_path, DIFFERENT, dtype=torch.bfloat16)
    mode = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    graphs = "vllm_ascend_models.ops.graphs.full_graphs_can_hold_layers_that_differ"
    arguments = EngineArgs(
        str(tmp_path), skip_tokenizer_init=True, compilation_config=mode
    )
    with (
        patch(graphs, lambda: False),
        pytest.raises(ValueError, match="all layers the attention workspace of the f"),
    ):
        arguments.create_engine_config()
