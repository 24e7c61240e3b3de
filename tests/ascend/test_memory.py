"""An NPU whose memory is not enough says so, as a device's allocator does."""

from pathlib import Path

import pytest
import torch

from ascend.test_graphs import EQUAL as CONFIG
from support.ascend import run_on_npu
from support.checkpoints import random_prompt, write_openelm_checkpoint
from support.engine import EngineError, Round

PROMPT = random_prompt(CONFIG, 17)
MIB = 1 << 20


def run_with_memory(path: Path, size: int, **engine_args) -> None:
    write_openelm_checkpoint(path, CONFIG, dtype=torch.bfloat16)
    env = {"NPU_EMULATOR_MEMORY": str(size)}
    run_on_npu(path, [Round([PROMPT], 2)], env=env, max_model_len=256, **engine_args)


def test_the_kv_cache_takes_what_is_free(tmp_path: Path):
    run_with_memory(tmp_path, 512 * MIB, kv_cache_memory_bytes=None)


def test_weights_that_do_not_fit_end_the_engine(tmp_path: Path):
    with pytest.raises(EngineError, match="NPU out of memory"):
        run_with_memory(tmp_path, 4 * MIB)


def test_a_kv_cache_that_does_not_fit_ends_the_engine(tmp_path: Path):
    with pytest.raises(EngineError, match="NPU out of memory"):
        run_with_memory(tmp_path, 256 * MIB, kv_cache_memory_bytes=512 * MIB)
