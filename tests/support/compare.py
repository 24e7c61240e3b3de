"""The one comparison by which our tests judge fp32 numbers against the reference."""

from collections.abc import Sequence

import numpy as np
import torch

from support.engine import Completion
from support.reference import (
    Config,
    LayerStages,
    Tensors,
    attention,
    decoder_layer,
    ffn,
    reference_logits,
)

# Two correct implementations differ by 4e-5 at most on logits up to 11, after 1,025
# tokens (measured, tests/oracle). The least wrong model of test_mutants.py, which
# has another eps, differs by 4e-3, and every other one by more than 4.
FP32_TOLERANCE = 1e-4

Array = np.ndarray | torch.Tensor


def max_abs_difference(got: Array, expected: Array) -> float:
    """Largest absolute difference; infinite where anything is not a finite number."""
    return float(_differences_by_row(got, expected).max())


def assert_close(got: Array, expected: Array, what: str) -> None:
    """Fail, naming ``what`` and the rows, unless all agree to fp32 rounding."""
    by_row = _differences_by_row(got, expected)
    wrong = np.flatnonzero(by_row > FP32_TOLERANCE)
    if len(wrong):
        raise AssertionError(
            f"{what}: differs by up to {by_row.max():.3g}, where {FP32_TOLERANCE:g} is "
            f"allowed; in {len(wrong)} of {len(by_row)} rows, from row {wrong[0]} on"
        )


def _differences_by_row(got: Array, expected: Array) -> np.ndarray:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        raise AssertionError(f"shape {got.shape} instead of {expected.shape}")
    difference = np.nan_to_num(np.abs(got - expected), nan=np.inf)
    return difference.reshape(len(difference), -1).max(-1)


@torch.inference_mode()
def assert_completions_close(
    config: Config,
    tensors: Tensors,
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
) -> None:
    """Fail unless every logit that the engine gave is the reference's.

    Compares the whole vocabulary at every prompt position that the engine was asked
    for, at every generated token, and the greedy tokens themselves.
    """
    for prompt, completion in zip(prompts, completions, strict=True):
        what = f"prompt of {len(prompt)} tokens"
        tokens = completion.token_ids
        expected = reference_logits(config, tensors, prompt + tokens[:-1])
        before, generated = expected[: len(prompt) - 1], expected[len(prompt) - 1 :]
        if completion.prompt_logits is not None and len(prompt) > 1:
            assert_close(completion.prompt_logits, before, f"{what}, prompt logits")
        assert_close(completion.logits, generated, f"{what}, logits of new tokens")
        if tokens != generated.argmax(-1).tolist():
            raise AssertionError(f"{what}: greedy tokens are not the reference's")


@torch.inference_mode()
def stage_differences(
    config: Config, tensors: Tensors, layers: dict[str, np.ndarray]
) -> dict[str, float]:
    """Largest difference of each part of each layer, fed with what the engine fed it.

    Args:
        config: keys of config.json.
        tensors: the checkpoint.
        layers: what an engine captured, see `support.engine.RoundResult.layers`.

    Returns:
        ``{"ffn": worst of all layers, "attn": ..., "layer": ...}``; a part is judged on
        its own input, so that a fault before it does not count against it.
    """
    worst = dict.fromkeys(("ffn", "attn", "layer"), 0.0)
    for layer in range(config["num_transformer_layers"]):
        got = LayerStages(
            *(torch.from_numpy(layers[f"{layer}.{x}"]) for x in LayerStages._fields)
        )
        expected = {
            "ffn": (got.ffn_out, ffn(tensors, layer, got.ffn_in)),
            "attn": (got.attn_out, attention(config, tensors, layer, got.attn_in)),
            "layer": (
                got.layer_out,
                decoder_layer(config, tensors, layer, got.layer_in).layer_out,
            ),
        }
        for stage, pair in expected.items():
            worst[stage] = max(worst[stage], max_abs_difference(*pair))
    return worst
