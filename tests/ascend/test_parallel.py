"""OpenELM over several NPUs, whose heads do not divide: the logits of one."""

from pathlib import Path

import pytest
import torch

from ascend.test_openelm import TINY, all_lengths
from support.ascend import (
    assert_bf16_close,
    needs_devices,
    openelm_reference,
    run_on_npu,
)
from support.checkpoints import true_geometry, write_openelm_checkpoint
from support.engine import RoundResult
from support.reference import Config


def run_in_parallel(path: Path, config: Config, tp: int, pp: int = 1) -> RoundResult:
    """Prompts and their continuation, judged; in one batch, all in every step."""
    needs_devices(tp * pp)
    round_ = all_lengths(config, (1, 17, 129))
    tensors = write_openelm_checkpoint(path, config, dtype=torch.bfloat16)
    [result] = run_on_npu(
        path,
        [round_],
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        distributed_executor_backend="mp",
        max_model_len=256,
        max_num_batched_tokens=256,  # so that eight workers stay small
        kv_cache_memory_bytes=8 << 20,
    )
    reference = openelm_reference(config, tensors)
    assert_bf16_close(reference, round_.prompts, result.completions)
    return result


@pytest.mark.parametrize(
    ("tp", "pp", "kv_heads"),
    # TINY's layers have 1, 2, 2 and 3 KV heads.
    [
        (2, 1, [5, 5]),
        (4, 1, [4, 4, 4, 4]),
        (1, 2, [3, 5]),
        (2, 2, [2, 2, 3, 3]),
    ],
)
def test_several_devices_together_give_right_logits(
    tmp_path: Path, tp: int, pp: int, kv_heads: list[int]
):
    assert run_in_parallel(tmp_path, TINY, tp, pp).kv_heads == kv_heads


@pytest.mark.parametrize(
    ("size", "tp"), [("270M", 8), ("450M", 4), ("1_1B", 2), ("3B", 4)]
)
def test_published_geometry_over_devices_gives_right_logits(
    tmp_path: Path, size: str, tp: int
):
    run_in_parallel(tmp_path, true_geometry(size, 2), tp)
