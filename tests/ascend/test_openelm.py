"""OpenELM on the real vllm-ascend: every logit against the plain reference."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from support.ascend import assert_bf16_close, openelm_reference, run_on_npu
from support.checkpoints import (
    openelm_config,
    random_prompt,
    true_geometry,
    write_openelm_checkpoint,
)
from support.engine import Round, RoundResult
from support.reference import Config, Tensors

# Like `TINY`, with heads of 64: the NPU's attention takes none of 32.
TINY = openelm_config(
    model_dim=256,
    head_dim=64,
    num_query_heads=[4, 8, 8, 12],
    num_kv_heads=[1, 2, 2, 3],
    ffn_multipliers=[0.5, 1.0, 2.97, 4.0],
)
BLOCK = 128  # tokens; vllm-ascend sets it with prefix caching and chunked prefill


class Run(NamedTuple):
    """What an engine was asked and what it answered."""

    config: Config
    tensors: Tensors
    rounds: list[Round]
    results: list[RoundResult]

    def assert_logits_are_right(self, index: int) -> None:
        assert_bf16_close(
            openelm_reference(self.config, self.tensors),
            self.rounds[index].prompts,
            self.results[index].completions,
        )


def run(path: Path, config: Config, rounds: list[Round], **engine_args) -> Run:
    tensors = write_openelm_checkpoint(path, config, dtype=torch.bfloat16)
    return Run(config, tensors, rounds, run_on_npu(path, rounds, **engine_args))


def all_lengths(config: Config, lengths: Sequence[int] = (1, 17, 129, 1025)) -> Round:
    prompts = [random_prompt(config, length) for length in lengths]
    return Round(prompts, 8, prompt_logits=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Run:
    long = random_prompt(TINY, 1025, seed=1)
    rounds = [all_lengths(TINY), Round([long], 8), Round([long], 8)]
    return run(tmp_path_factory.mktemp("tiny"), TINY, rounds)


def test_prompt_and_decode_logits_are_right_at_every_position(tiny: Run):
    tiny.assert_logits_are_right(0)


def test_a_prompt_found_in_the_prefix_cache_gives_right_logits(tiny: Run):
    assert tiny.results[1].completions[0].num_cached_tokens == 0
    assert tiny.results[2].completions[0].num_cached_tokens == 1024
    tiny.assert_logits_are_right(1)
    tiny.assert_logits_are_right(2)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Steps of 128 tokens, and too few blocks for all requests."""
    long = random_prompt(TINY, 1025, seed=4)
    running = [random_prompt(TINY, n, seed=5) for n in (5, 17, 31)]
    # Each fills 2 blocks; four of them need 12 from their 257th token on.
    greedy = [random_prompt(TINY, 2 * BLOCK - 6, seed=seed) for seed in range(6, 10)]
    rounds = [
        Round([long], 8, prompt_logits=True),
        Round([*running, random_prompt(TINY, 700, seed=10)], 12),
        Round(greedy, 12),
    ]
    return run(
        tmp_path_factory.mktemp("crowded"),
        TINY,
        rounds,
        max_model_len=1152,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        num_gpu_blocks_override=11,  # vLLM keeps one of them empty
    )


def test_a_prompt_prefilled_in_chunks_gives_right_logits(crowded: Run):
    assert crowded.results[0].steps[:9] == [[128]] * 8 + [[1]]
    crowded.assert_logits_are_right(0)


def test_decodes_beside_a_long_prefill_give_right_logits(crowded: Run):
    mixed = [step for step in crowded.results[1].steps if step[:3] == [1, 1, 1]]
    assert any(len(step) == 4 and step[3] > 100 for step in mixed)
    crowded.assert_logits_are_right(1)


def test_preempted_requests_give_right_logits(crowded: Run):
    assert crowded.results[2].preemptions > 0
    crowded.assert_logits_are_right(2)


@pytest.mark.parametrize("size", ["270M", "450M", "1_1B", "3B"])
def test_published_geometry_gives_right_logits(size: str, tmp_path: Path):
    config = true_geometry(size, 2)
    # Not 1025: the plain reference in bf16 would take a CPU minutes.
    rounds = [all_lengths(config, (1, 17, 129))]
    run(tmp_path, config, rounds).assert_logits_are_right(0)
