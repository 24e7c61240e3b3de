"""Loading and start of our OpenELM against vLLM's own Llama, on the same weights.

Starts plain `vllm serve` on each in turns. A ratio is the median over rounds of
OpenELM's time over Llama's in the same round: of loading the weights, as the engine
logs it, and from the command to a server that says it is healthy.

    python benchmarks/startup.py [--rounds 5] [--json]
"""

import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_ascend_models.cli.demo_model import write_demo_model
from vllm_ascend_models.cli.server import running_server

LIMIT = 1.05


def start_once(model: Path, log: Path) -> dict[str, float]:
    """Seconds to load the weights and to a healthy server."""
    start = time.perf_counter()
    with running_server(model, "--max-model-len", "2048", log_path=log):
        ready = time.perf_counter() - start
    [loading] = re.findall(r"Loading weights took ([\d.]+) seconds", log.read_text())
    return {"loading weights": float(loading), "ready server": ready}


def main(
    rounds: Annotated[int, typer.Option(help="Rounds to measure.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the ratios; exit 1 where one is over the limit."""
    samples: list[tuple[dict[str, float], dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        openelm, llama = directory / "openelm", directory / "llama"
        write_demo_model(openelm, arch="openelm", layers_differ=False)
        write_demo_model(llama, arch="llama")
        log = directory / "server.log"
        for model in (openelm, llama):
            start_once(model, log)  # fills the compile cache and the page cache
        for turn in track(range(rounds), "Rounds", console=Console(stderr=True)):
            if turn % 2:
                ours, theirs = start_once(openelm, log), start_once(llama, log)
            else:
                theirs, ours = start_once(llama, log), start_once(openelm, log)
            samples.append((ours, theirs))
    result = {
        what: {
            "openelm_s": statistics.median(ours[what] for ours, _ in samples),
            "llama_s": statistics.median(theirs[what] for _, theirs in samples),
            "ratio": statistics.median(o[what] / t[what] for o, t in samples),
        }
        for what in samples[0][0]
    }
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        table = Table(title=f"OpenELM over Llama, same weights, {rounds} rounds")
        for column in ("", "OpenELM s", "Llama s", "ratio"):
            table.add_column(column, justify="left" if not column else "right")
        for what, row in result.items():
            table.add_row(
                what,
                f"{row['openelm_s']:.2f}",
                f"{row['llama_s']:.2f}",
                f"{row['ratio']:.3f}",
            )
        Console(width=80).print(table)
    raise typer.Exit(int(any(row["ratio"] > LIMIT for row in result.values())))


if __name__ == "__main__":
    typer.run(main)
