"""Every logit that vLLM gives for an OpenELM, against the plain reference, in fp32.

Each engine runs in a process of its own and answers several tests: starting one is
what costs. `tests/oracle` judges the reference, `test_mutants.py` the comparison.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import pytest

from support.checkpoints import (
    TINY,
    TINY_PLAIN_QK_UNTIED,
    openelm_config,
    random_prompt,
    true_geometry,
    write_openelm_checkpoint,
)
from support.compare import (
    FP32_TOLERANCE,
    assert_completions_close,
    stage_differences,
)
from support.engine import Round, RoundResult, engine_version, run_engine
from support.reference import Config, Tensors

LENGTHS = [1, 17, 129, 1025]


class Run(NamedTuple):
    """What an engine was asked and what it answered."""

    config: Config
    tensors: Tensors
    rounds: list[Round]
    results: list[RoundResult]

    def assert_logits_are_right(self, index: int) -> None:
        assert_completions_close(
            self.config,
            self.tensors,
            self.rounds[index].prompts,
            self.results[index].completions,
        )


def run(path: Path, config: Config, rounds: list[Round], **engine_args) -> Run:
    tensors = write_openelm_checkpoint(path, config)
    results = run_engine(path, rounds, **engine_args)
    return Run(config, tensors, rounds, results)


def all_lengths(config: Config, max_tokens: int = 16) -> Round:
    prompts = [random_prompt(config, length) for length in LENGTHS]
    return Round(prompts, max_tokens, prompt_logits=True)


# --- one engine with room for everything -------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Run:
    long = random_prompt(TINY, 1025, seed=1)
    branch = long[:700] + random_prompt(TINY, 200, seed=2)
    rounds = [
        all_lengths(TINY),
        Round([random_prompt(TINY, 129, seed=3)], capture_layers=True),
        Round([long], 8),
        Round([long], 8),
        Round([branch], 8),
    ]
    path = tmp_path_factory.mktemp("tiny")
    return run(path, TINY, rounds, max_model_len=2048)


def test_prompt_and_decode_logits_are_right_at_every_position(tiny: Run):
    assert [len(c.token_ids) for c in tiny.results[0].completions] == [16] * 4
    tiny.assert_logits_are_right(0)


@pytest.mark.parametrize("stage", ["ffn", "attn", "layer"])
def test_part_of_a_layer_computes_what_the_reference_computes(tiny: Run, stage: str):
    assert tiny.results[1].steps == [[129]]
    differences = stage_differences(TINY, tiny.tensors, tiny.results[1].layers)
    assert differences[stage] <= FP32_TOLERANCE


def test_a_prompt_found_in_the_prefix_cache_gives_the_same_logits(tiny: Run):
    (first,), (again,) = tiny.results[2].completions, tiny.results[3].completions
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens >= 1025 - 128  # all but the last block at most
    assert again.token_ids == first.token_ids
    tiny.assert_logits_are_right(2)
    tiny.assert_logits_are_right(3)


def test_a_prompt_that_leaves_a_cached_prefix_gives_its_own_logits(tiny: Run):
    (branch,) = tiny.results[4].completions
    assert 700 - 128 <= branch.num_cached_tokens <= 700
    tiny.assert_logits_are_right(4)


# --- one engine with too little of everything --------------------------------------

BLOCK = 32


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Steps of 128 tokens, and 35 blocks of KV cache."""
    long = random_prompt(TINY, 1025, seed=4)
    running = [random_prompt(TINY, n, seed=5) for n in (5, 17, 31)]
    # Each fills 8 blocks; four of them need 36 from their 257th token on.
    greedy = [random_prompt(TINY, 8 * BLOCK - 6, seed=seed) for seed in range(6, 10)]
    rounds = [
        Round([long], 12, prompt_logits=True),
        Round([*running, random_prompt(TINY, 700, seed=10)], 16),
        Round(greedy, 24),
    ]
    return run(
        tmp_path_factory.mktemp("crowded"),
        TINY,
        rounds,
        max_model_len=34 * BLOCK,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        block_size=BLOCK,
        num_gpu_blocks_override=36,  # vLLM keeps one of them empty
    )


def test_a_prompt_prefilled_in_chunks_gives_the_same_logits(crowded: Run):
    assert crowded.results[0].steps[:9] == [[128]] * 8 + [[1]]
    crowded.assert_logits_are_right(0)


def test_decodes_beside_a_long_prefill_give_the_same_logits(crowded: Run):
    mixed = [step for step in crowded.results[1].steps if step[:3] == [1, 1, 1]]
    assert any(len(step) == 4 and step[3] > 100 for step in mixed)
    crowded.assert_logits_are_right(1)


def test_preempted_requests_give_the_same_logits(crowded: Run):
    assert crowded.results[2].preemptions > 0
    crowded.assert_logits_are_right(2)


# --- other configurations ----------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "num_layers"), [("270M", 3), ("450M", 2), ("1_1B", 2), ("3B", 2)]
)
def test_published_geometry_gives_right_logits(
    size: str, num_layers: int, tmp_path: Path
):
    config = true_geometry(size, num_layers)
    assert len(set(config["num_query_heads"])) == num_layers
    rounds = [all_lengths(config, 12)]
    run(tmp_path, config, rounds, max_model_len=2048).assert_logits_are_right(0)


def test_model_without_qk_norm_and_with_a_head_of_its_own_gives_right_logits(
    tmp_path: Path,
):
    rounds = [all_lengths(TINY_PLAIN_QK_UNTIED)]
    result = run(tmp_path, TINY_PLAIN_QK_UNTIED, rounds, max_model_len=2048)
    result.assert_logits_are_right(0)


def test_compiled_model_gives_right_logits(tmp_path: Path):
    # Two layers that differ, because torch compiles each layer for itself.
    config = openelm_config(
        model_dim=128,
        head_dim=32,
        num_query_heads=[4, 12],
        num_kv_heads=[1, 3],
        ffn_multipliers=[0.5, 4.0],
    )
    rounds = [all_lengths(config), Round([random_prompt(config, 64, seed=11)], 4)]
    result = run(tmp_path, config, rounds, max_model_len=2048, compiled=True)
    result.assert_logits_are_right(0)
    result.assert_logits_are_right(1)


def test_model_runner_v2_gives_right_logits(tmp_path: Path):
    if engine_version() < (0, 23):
        pytest.skip("vLLM has a model runner V2 for the CPU from 0.23 on only")
    if not _triton_can_use_the_cpu():
        pytest.skip("model runner V2 needs a Triton with a CPU backend; none is here")
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    result = run(tmp_path, TINY, [all_lengths(TINY)], max_model_len=2048, env=env)
    result.assert_logits_are_right(0)


def _triton_can_use_the_cpu() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    return importlib.util.find_spec("triton.backends.cpu") is not None
