"""The one comparison by which our tests judge fp32 numbers against the reference."""

import numpy as np
import torch

# fp32 rounding of two correct implementations differs by 1e-5 to 3e-5 on logits up to
# 10 (measured); the least wrong model in test_mutants.py differs by over 1e-2.
FP32_TOLERANCE = 1e-4

Array = np.ndarray | torch.Tensor


def max_abs_difference(got: Array, expected: Array) -> float:
    """Largest absolute difference; infinite where anything is not a finite number."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        raise AssertionError(f"shape {got.shape} instead of {expected.shape}")
    difference = np.abs(got - expected)
    return float(difference.max()) if np.isfinite(difference).all() else np.inf


def assert_close(got: Array, expected: Array, what: str) -> None:
    """Fail, naming ``what`` and the worst row, unless all agree to fp32 rounding."""
    worst = max_abs_difference(got, expected)
    if worst <= FP32_TOLERANCE:
        return
    rows = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64))
    by_row = rows.reshape(len(rows), -1).max(-1)
    wrong = int((~(by_row <= FP32_TOLERANCE)).sum())
    raise AssertionError(
        f"{what}: differs by up to {worst:.3g} (allowed {FP32_TOLERANCE:g}), first in "
        f"row {int(np.argmax(~(by_row <= FP32_TOLERANCE)))}, in {wrong} of "
        f"{len(by_row)} rows"
    )
