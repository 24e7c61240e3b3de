"""Loading and start of our OpenELM against vLLM's own Llama, on the same weights.

Starts `vllm serve` on each in turns. A ratio is the median over rounds of OpenELM's
time over Llama's in the same round: of loading the weights, as the engine logs it, and
from the command to a server that says it is healthy.

    python benchmarks/startup.py [--rounds 5] [--compiled] [--json]
"""

import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from report import show, summarize
from rich.console import Console
from rich.progress import track

from vllm_ascend_models.cli.demo_model import write_demo_model
from vllm_ascend_models.cli.server import quick_start, running_server

LIMIT = 1.05


# vLLM rounds what it logs to 10 ms, a tenth of the time that the demo weights take to
# load. With a log of the arguments beside the message nothing is rounded.
LOGGING = {
    "version": 1,
    "formatters": {"exact": {"format": "%(message)s %(args)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "exact"}},
    "loggers": {"vllm": {"handlers": ["stderr"], "level": "INFO"}},
}
LOADING = re.compile(r"Loading weights took .* seconds \(([\d.]+),\)")


def start_once(model: Path, log: Path, *flags: str) -> dict[str, float]:
    """Seconds to load the weights and to a healthy server."""
    logging = log.with_name("logging.json")
    logging.write_text(json.dumps(LOGGING))
    env = quick_start(os.environ) | {"VLLM_LOGGING_CONFIG_PATH": str(logging)}
    flags += ("--max-model-len", "2048")
    start = time.perf_counter()
    with running_server(model, *flags, log_path=log, env=env):
        ready = time.perf_counter() - start
    [loading] = LOADING.findall(log.read_text())
    return {"loading weights": float(loading), "ready server": ready}


def main(
    rounds: Annotated[int, typer.Option(help="Rounds to measure.")] = 5,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled", help="Compile the models: on a CPU, minutes for each start."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the ratios; exit 1 where one is over the limit."""
    flags = () if compiled else ("--enforce-eager",)
    samples: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        openelm, llama = directory / "openelm", directory / "llama"
        write_demo_model(openelm, arch="openelm", layers_differ=False)
        write_demo_model(llama, arch="llama")
        log = directory / "server.log"
        for model in (openelm, llama):
            start_once(model, log, *flags)  # fills compile cache and page cache
        for turn in track(range(rounds), "Rounds", console=Console(stderr=True)):
            order = (openelm, llama) if turn % 2 else (llama, openelm)
            seconds = {model: start_once(model, log, *flags) for model in order}
            for what, ours in seconds[openelm].items():
                samples.setdefault(what, []).append((ours, seconds[llama][what]))
    summary = summarize(samples)
    show(summary, "s", as_json)
    raise typer.Exit(int(any(row["ratio"] > LIMIT for row in summary.values())))


if __name__ == "__main__":
    typer.run(main)
