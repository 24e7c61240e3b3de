"""Our OpenELM against vLLM's own Llama: the same weights, engine, prompts and run.

Two engines wait side by side, in their default configuration (bf16, compiled), and
are measured in turns, so that what else the machine does falls on both. A ratio is
the median over rounds of OpenELM's throughput over Llama's in the same round.

    python benchmarks/openelm_vs_llama.py [--rounds 7] [--json]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_ascend_models.cli.demo_model import write_demo_model

LIMIT = 0.97
WORKER = Path(__file__).with_name("engine_worker.py")

# Prefill: long prompts, one token out. Decode: short prompts, the time of the output
# tokens after the first.
TASKS = {
    "prefill, batch 1": {"batch": 1, "prompt_tokens": 1024, "output_tokens": 1},
    "prefill, batch 16": {"batch": 16, "prompt_tokens": 256, "output_tokens": 1},
    "decode, batch 1": {"batch": 1, "prompt_tokens": 16, "output_tokens": 65},
    "decode, batch 16": {"batch": 16, "prompt_tokens": 16, "output_tokens": 33},
}


class Engine:
    """A waiting engine in a process of its own."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ
            | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": "1",
            },
        )
        self.kv_bytes_per_token = int(self._answer())

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


def compare(openelm: Engine, llama: Engine, rounds: int) -> dict[str, dict[str, float]]:
    """Throughputs and their ratio for every task, in alternating order."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in TASKS}
    for engine in (openelm, llama):
        for task in TASKS.values():
            engine.throughput(task)  # warm up
    for turn in track(range(rounds), "Rounds", console=Console(stderr=True)):
        for name, task in TASKS.items():
            if turn % 2:
                ours, theirs = openelm.throughput(task), llama.throughput(task)
            else:
                theirs, ours = llama.throughput(task), openelm.throughput(task)
            samples[name].append((ours, theirs))
    return {
        name: {
            "openelm_tokens_per_s": statistics.median(ours for ours, _ in pairs),
            "llama_tokens_per_s": statistics.median(theirs for _, theirs in pairs),
            "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
            "ratio_min": min(ours / theirs for ours, theirs in pairs),
            "ratio_max": max(ours / theirs for ours, theirs in pairs),
        }
        for name, pairs in samples.items()
    }


def print_table(result: dict[str, dict[str, float]], rounds: int) -> None:
    """One row a task, at most 80 columns."""
    table = Table(title=f"OpenELM over Llama, same weights, {rounds} rounds")
    for column in ("", "OpenELM tok/s", "Llama tok/s", "ratio", "min–max"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in result.items():
        table.add_row(
            name,
            f"{row['openelm_tokens_per_s']:.0f}",
            f"{row['llama_tokens_per_s']:.0f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_min']:.2f}–{row['ratio_max']:.2f}",
        )
    Console(width=80).print(table)


def main(
    rounds: Annotated[int, typer.Option(help="Rounds to measure.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the ratios; exit 1 where one is under the limit."""
    with tempfile.TemporaryDirectory() as directory:
        openelm_dir, llama_dir = Path(directory, "openelm"), Path(directory, "llama")
        write_demo_model(openelm_dir, arch="openelm", layers_differ=False)
        write_demo_model(llama_dir, arch="llama")
        engines: list[Engine] = []
        try:
            engines += [Engine(openelm_dir), Engine(llama_dir)]
            openelm, llama = engines
            result = compare(openelm, llama, rounds)
            kv_bytes = (openelm.kv_bytes_per_token, llama.kv_bytes_per_token)
        finally:
            for engine in engines:
                engine.stop()
    if as_json:
        print(json.dumps({"tasks": result, "kv_bytes_per_token": kv_bytes}, indent=2))
    else:
        print_table(result, rounds)
        print("KV bytes per token: OpenELM {}, Llama {}".format(*kv_bytes))
    raise typer.Exit(int(any(row["ratio"] < LIMIT for row in result.values())))


if __name__ == "__main__":
    typer.run(main)
