"""Our OpenELM against vLLM's own Llama: the same weights, engine, prompts and run.

Two engines wait side by side and are measured in turns, so that what else the machine
does falls on both. A ratio is the median over rounds of OpenELM's throughput over
Llama's in the same round.

    python benchmarks/openelm_vs_llama.py [--rounds 7] [--eager] [--dtype float32]
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from report import show, summarize
from rich.console import Console
from rich.progress import track

from vllm_ascend_models.cli.demo_model import write_demo_model

LIMIT = 0.97
WORKER = Path(__file__).with_name("engine_worker.py")

# Prefill: long prompts, one token out. Decode: short prompts, the time of the output
# tokens after the first.
TASKS = {
    "prefill, batch 1": {"batch": 1, "prompt_tokens": 512, "output_tokens": 1},
    "prefill, batch 16": {"batch": 16, "prompt_tokens": 64, "output_tokens": 1},
    "decode, batch 1": {"batch": 1, "prompt_tokens": 16, "output_tokens": 65},
    "decode, batch 16": {"batch": 16, "prompt_tokens": 16, "output_tokens": 33},
}


class Engine:
    """A waiting engine in a process of its own."""

    def __init__(self, model: Path, engine_args: dict[str, Any]) -> None:
        engine_args = {"model": str(model), **engine_args}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(engine_args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ
            | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                # One thread each: those of two engines would wait for each other.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
            },
        )
        self._answer()  # of an engine that is ready

    def throughput(self, task: dict[str, int]) -> float:
        """Tokens a second: of the prompts, or of the output after its first token."""
        assert self._process.stdin is not None
        seconds = self._ask(task)
        if task["output_tokens"] == 1:
            return task["batch"] * task["prompt_tokens"] / seconds
        seconds -= self._ask(task | {"output_tokens": 1})
        return task["batch"] * (task["output_tokens"] - 1) / seconds

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _ask(self, task: dict[str, int]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> float:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise typer.BadParameter(f"the engine ended: {self._process.wait()}")
        return json.loads(line)


def compare(
    openelm: Engine, llama: Engine, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Tokens a second of both engines for every task, taken in turns."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in TASKS}
    for engine in (openelm, llama):
        for task in TASKS.values():
            engine.throughput(task)  # warm up
    for turn in track(range(rounds), "Rounds", console=Console(stderr=True)):
        order = (openelm, llama) if turn % 2 else (llama, openelm)
        for name, task in TASKS.items():
            speed = {engine: engine.throughput(task) for engine in order}
            samples[name].append((speed[openelm], speed[llama]))
    return samples


def main(
    rounds: Annotated[int, typer.Option(help="Rounds to measure.")] = 7,
    eager: Annotated[
        bool,
        typer.Option("--eager", help="Compile nothing: on a CPU, that takes minutes."),
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="Of weights and activations, as in vLLM.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the ratios; exit 1 where one is under the limit."""
    with tempfile.TemporaryDirectory() as directory:
        openelm_dir, llama_dir = Path(directory, "openelm"), Path(directory, "llama")
        write_demo_model(openelm_dir, arch="openelm", layers_differ=False)
        write_demo_model(llama_dir, arch="llama")
        engines: list[Engine] = []
        try:
            engine_args = {"enforce_eager": eager, "dtype": dtype}
            engines.append(Engine(openelm_dir, engine_args))
            engines.append(Engine(llama_dir, engine_args))
            summary = summarize(compare(*engines, rounds))
        finally:
            for engine in engines:
                engine.stop()
    show(summary, "tok/s", as_json)
    raise typer.Exit(int(any(row["ratio"] < LIMIT for row in summary.values())))


if __name__ == "__main__":
    typer.run(main)
