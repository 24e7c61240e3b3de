"""The logits tests must be able to fail: each fault here has to be caught by them.

The faults run in one real engine, and are judged by the very functions that judge the
model. The controls change the model by the same means without a fault, and must pass.
"""

from pathlib import Path

import pytest

from support.checkpoints import (
    TINY,
    random_prompt,
    random_tensors,
    save_openelm_checkpoint,
)
from support.compare import (
    FP32_TOLERANCE,
    assert_completions_close,
    max_abs_difference,
    stage_differences,
)
from support.engine import EngineError, Round, RoundResult, run_engine
from support.mutants import (
    ATTENTION_MUTANTS,
    CONTROLS,
    FFN_MUTANTS,
    LAYER_MUTANTS,
    MODEL_MUTANTS,
    MUTANTS,
)
from support.reference import Config, Tensors, reference_logits

PROMPT = random_prompt(TINY, 129)
# Caught by a margin and not by luck: tenfold what is allowed to rounding.
WIDE = 10 * FP32_TOLERANCE

FAULTS = [name for name in MUTANTS if name is not None and name not in CONTROLS]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """A small embedding, on which the eps of a norm counts, and logits as ever."""
    tensors = random_tensors(TINY)
    tensors["transformer.token_embeddings.weight"] *= 0.1
    tensors["transformer.norm.weight"] *= 10
    return tensors


@pytest.fixture(scope="module")
def mutants(
    tmp_path_factory: pytest.TempPathFactory, tensors: Tensors
) -> dict[str, RoundResult]:
    path = tmp_path_factory.mktemp("mutants")
    save_openelm_checkpoint(path, TINY, tensors)
    names = [name for name in MUTANTS if name is not None]
    rounds = [
        Round([PROMPT], prompt_logits=True, capture_layers=True, mutant=name)
        for name in names
    ]
    # A prefix cache would keep K and V that another mutant has left.
    results = run_engine(path, rounds, max_model_len=512, enable_prefix_caching=False)
    return dict(zip(names, results, strict=True))


def logits_difference(tensors: Tensors, result: RoundResult) -> float:
    (completion,) = result.completions
    expected = reference_logits(TINY, tensors, PROMPT)[:-1]
    return max_abs_difference(completion.prompt_logits, expected)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught_by_the_logits(mutants, tensors, name: str):
    with pytest.raises(AssertionError, match="differs by up to"):
        assert_completions_close(TINY, tensors, [PROMPT], mutants[name].completions)
    assert logits_difference(tensors, mutants[name]) > WIDE


@pytest.mark.parametrize("name", CONTROLS)
def test_the_means_by_which_faults_are_made_is_no_fault(mutants, tensors, name: str):
    assert_completions_close(TINY, tensors, [PROMPT], mutants[name].completions)
    differences = stage_differences(TINY, tensors, mutants[name].layers)
    assert max(differences.values()) <= FP32_TOLERANCE


@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        *((name, {"attn", "layer"}) for name in ATTENTION_MUTANTS),
        *((name, {"ffn", "layer"}) for name in FFN_MUTANTS),
        *((name, {"layer"}) for name in LAYER_MUTANTS),
        *((name, set()) for name in MODEL_MUTANTS),
    ],
)
def test_fault_is_blamed_on_the_part_that_has_it(
    mutants, tensors, name: str, blamed: set[str]
):
    differences = stage_differences(TINY, tensors, mutants[name].layers)
    assert {part for part, x in differences.items() if x > FP32_TOLERANCE} == blamed


def shifted(values: list) -> list:
    """Layer i has what layer i + 1 should have; the last one keeps its own."""
    return [*values[1:], values[-1]]


@pytest.mark.parametrize(
    ("fields", "tensor"),
    [
        (("num_query_heads", "num_kv_heads"), r"layers\.0\.attn\.\w+_proj\.weight"),
        (("ffn_multipliers",), r"layers\.1\.ffn\.proj_[12]\.weight"),
    ],
    ids=["heads", "FFN width"],
)
def test_layer_with_the_next_ones_width_does_not_load(
    tensors, tmp_path: Path, fields: tuple[str, ...], tensor: str
):
    config: Config = TINY | {field: shifted(TINY[field]) for field in fields}
    save_openelm_checkpoint(tmp_path, config, tensors)
    with pytest.raises(EngineError, match=rf"Tensor `transformer\.{tensor}`"):
        run_engine(tmp_path, [Round([PROMPT])], max_model_len=512)
