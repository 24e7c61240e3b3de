"""What two-sided benchmarks print: medians of both sides, and their ratio by round."""

import json
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

Pairs = Mapping[str, Sequence[tuple[float, float]]]


def summarize(pairs: Pairs) -> dict[str, dict[str, float]]:
    """Medians over rounds; a ratio is of two figures from the same round.

    Args:
        pairs: for each quantity, OpenELM's figure and Llama's of every round.
    """
    result = {}
    for name, rounds in pairs.items():
        ratios = [ours / theirs for ours, theirs in rounds]
        result[name] = {
            "openelm": statistics.median(ours for ours, _ in rounds),
            "llama": statistics.median(theirs for _, theirs in rounds),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "rounds": len(rounds),
        }
    return result


def show(summary: Mapping[str, Mapping[str, float]], unit: str, as_json: bool) -> None:
    """Print a summary as JSON, or as a table of at most 80 columns."""
    if as_json:
        print(json.dumps({"unit": unit, "ratios": summary}, indent=2))
        return
    table = Table(title="OpenELM over Llama, same weights")
    for column in (
        "",
        f"OpenELM {unit}",
        f"Llama {unit}",
        "ratio",
        "min-max",
        "rounds",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, row in summary.items():
        table.add_row(
            name,
            f"{row['openelm']:.4g}",
            f"{row['llama']:.4g}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}",
            f"{row['rounds']}",
        )
    Console(width=80).print(table)
