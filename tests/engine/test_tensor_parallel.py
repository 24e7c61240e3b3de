"""Layers whose heads do not divide, on several workers: the logits of one device."""

from pathlib import Path

import pytest

from support.checkpoints import (
    TINY,
    random_prompt,
    true_geometry,
    write_openelm_checkpoint,
)
from support.compare import assert_completions_close
from support.engine import Round, engine_version, run_engine

PARALLEL = {"distributed_executor_backend": "mp", "max_model_len": 512}
PROMPTS = [random_prompt(TINY, length) for length in (1, 17, 300)]


pipelined = pytest.mark.skipif(
    engine_version() >= (0, 32),
    reason="on a CPU vLLM 0.32 fails in its scheduler, its own Llama does too",
)


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "kv_heads"),
    # TINY has 1, 2, 2 and 3 KV heads.
    [
        (2, 1, [1 + 1 + 1 + 2] * 2),
        (4, 1, [1 + 1 + 1 + 1] * 4),
        pytest.param(1, 2, [1 + 2, 2 + 3], marks=pipelined),
        pytest.param(2, 2, [1 + 1] * 2 + [1 + 2] * 2, marks=pipelined),
    ],
)
def test_workers_together_give_the_logits_of_the_reference(
    tmp_path: Path, tp_size: int, pp_size: int, kv_heads: list[int]
):
    tensors = write_openelm_checkpoint(tmp_path, TINY)
    # Earlier engines give logprobs of prompts whatever the mode, and their workers on a
    # CPU are spawned, out of reach of what `engine_worker` does about it.
    prompt_logits = engine_version() >= (0, 32)
    [result] = run_engine(
        tmp_path,
        [Round(PROMPTS, 8, prompt_logits=prompt_logits)],
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        **PARALLEL,
    )
    assert_completions_close(TINY, tensors, PROMPTS, result.completions)
    assert result.kv_heads == kv_heads


# Size: layers, and the KV heads of a worker over all of them at TP 2 and at TP 4.
PUBLISHED = {
    "270M": (16, 36, 20),
    "450M": (20, 50, 30),
    "1_1B": (28, 91, 53),
    "3B": (36, 90, 54),
}


@pytest.mark.skipif(engine_version() < (0, 32), reason="seen on the newest engine")
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("size", PUBLISHED)
def test_a_worker_keeps_no_more_kv_heads_of_a_published_size_than_it_must(
    tmp_path: Path, size: str, tp_size: int
):
    num_layers, *kv_heads = PUBLISHED[size]
    # All layers and heads, but narrow: the KV cache does not know the difference.
    narrow = {"model_dim": 64, "head_dim": 32, "ffn_multipliers": [1.0] * num_layers}
    write_openelm_checkpoint(tmp_path, true_geometry(size, num_layers) | narrow)
    [result] = run_engine(
        *(tmp_path, [Round([[1, 2, 3]])]), tensor_parallel_size=tp_size, **PARALLEL
    )
    assert result.kv_heads == [kv_heads[tp_size // 4]] * tp_size
