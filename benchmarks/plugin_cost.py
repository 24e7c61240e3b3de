"""What the plugin adds to a `vllm` process: the time of its `register()` call.

Each sample is a fresh process that has loaded what `vllm serve` loads before it calls
plugins; the call is timed in it, and so is that process's whole start for scale.

    python benchmarks/plugin_cost.py [--samples 9] [--json]
"""

import json
import statistics
import subprocess
import sys
import time
from typing import Annotated

import typer

LIMIT_MS = 20.0

SAMPLE = """
import time
import vllm.entrypoints.cli.serve
from vllm.engine.arg_utils import EngineArgs
start = time.perf_counter()
from vllm_ascend_models import register
register()
print(1000 * (time.perf_counter() - start))
"""


def sample() -> tuple[float, float]:
    """One fresh process: milliseconds of the call, seconds of the process."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE], capture_output=True, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1]), time.perf_counter() - start


def main(
    samples: Annotated[int, typer.Option(help="Processes to start.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the plugin's cost; exit 1 where its median is over the limit."""
    calls, starts = zip(*(sample() for _ in range(samples)), strict=True)
    result = {
        "register_ms": statistics.median(calls),
        "register_ms_max": max(calls),
        "process_start_s": statistics.median(starts),
        "samples": samples,
        "limit_ms": LIMIT_MS,
    }
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"register(): median {result['register_ms']:.1f} ms, "
            f"worst {result['register_ms_max']:.1f} ms of {samples} processes, "
            f"limit {LIMIT_MS:.0f} ms; a process takes "
            f"{result['process_start_s']:.1f} s to get there."
        )
    raise typer.Exit(int(result["register_ms"] > LIMIT_MS))


if __name__ == "__main__":
    typer.run(main)
