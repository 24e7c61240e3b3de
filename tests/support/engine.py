"""Run vLLM on a checkpoint in a process of its own, and get logits back.

A fresh process for each engine: what one leaves behind (environment variables that
vLLM caches, process groups, a crash) never reaches the next. Eager ones are forked
from a server that has imported vLLM and done nothing else, because importing takes
as long as the engine itself.
"""

import importlib.metadata
import json
import multiprocessing
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

_TESTS = Path(__file__).parents[1]
_TIMEOUT_SECONDS = 600
_ENGINE_IN_THIS_PROCESS = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(_TESTS), os.environ.get("PYTHONPATH")])
    ),
    "PYTHONSAFEPATH": "1",  # the package installed, not the folder in the current one
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class EngineError(Exception):
    """The engine's process ended badly; the message holds the end of its output."""


@dataclass(frozen=True)
class Round:
    """One call of ``LLM.generate``: prompts that run as one batch.

    Attributes:
        prompts: token ids of each prompt.
        max_tokens: tokens to generate greedily for each.
        prompt_logits: also return logits at every prompt position; vLLM then does not
            look into the prefix cache.
        capture_layers: also return what goes in and out of every layer's parts. Only
            for one prompt, one token and one prefill step.
        mutant: name in `support.mutants.MUTANTS`, the fault to run with.
    """

    prompts: list[list[int]]
    max_tokens: int = 1
    prompt_logits: bool = False
    capture_layers: bool = False
    mutant: str | None = None


@dataclass(frozen=True)
class Completion:
    """What the engine answered to one prompt of T tokens."""

    token_ids: list[int]
    logits: np.ndarray  # [generated, vocab]: the logits each token was chosen from
    prompt_logits: (
        np.ndarray | None
    )  # [T - 1, vocab]: row t predicts prompt token t + 1
    num_cached_tokens: int


@dataclass(frozen=True)
class RoundResult:
    """What the engine did in one round.

    Attributes:
        completions: one a prompt, in order.
        steps: for each forward pass, the tokens scheduled for each request in it; of
            engines with one device only.
        preemptions: requests that lost their KV blocks and had to start again.
        kv_heads: for each worker, the KV heads it keeps, summed over its layers.
        layers: ``"<layer>.<stage>"`` to ``[T, dim]``, the stages being those of
            `support.reference.LayerStages`.
    """

    completions: list[Completion]
    steps: list[list[int]]
    preemptions: int
    kv_heads: list[int]
    layers: dict[str, np.ndarray] = field(default_factory=dict)


def engine_version() -> tuple[int, int]:
    """Major and minor version of the vLLM in this environment."""
    major, minor = importlib.metadata.version("vllm").split(".")[:2]
    return int(major), int(minor)


def run_engine(
    checkpoint: Path,
    rounds: list[Round],
    *,
    compiled: bool = False,
    dtype: str = "float32",
    env: dict[str, str] | None = None,
    **engine_args: Any,
) -> list[RoundResult]:
    """Start an engine on ``checkpoint``, run the rounds in turn, stop it.

    Args:
        checkpoint: a directory as `support.checkpoints` writes them.
        rounds: what to ask.
        compiled: let vLLM compile the model; eager otherwise.
        dtype: of weights and activations.
        env: further environment variables.
        **engine_args: arguments of `vllm.LLM`.

    Raises:
        EngineError: the process failed or took longer than it ever should.
    """
    result_file = checkpoint / "result.npz"
    log_file = checkpoint / "engine.log"
    result_file.unlink(missing_ok=True)
    log_file.write_text("")
    plan = {
        "engine_args": {
            "model": str(checkpoint),
            "dtype": dtype,
            "enforce_eager": not compiled,
            **engine_args,
        },
        "rounds": [asdict(round_) for round_ in rounds],
        "env": env or {},
    }
    _run_process(compiled, json.dumps(plan), str(result_file), str(log_file))
    with np.load(result_file) as arrays:
        return [_read_round(arrays, i, r) for i, r in enumerate(rounds)]


def _run_process(compiled: bool, plan: str, result_file: str, log_file: str) -> None:
    env = dict(_ENGINE_IN_THIS_PROCESS)
    if compiled:
        # Two cores have no room for torch's pool of compile workers.
        env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    else:
        # `enforce_eager` alone leaves vLLM's compiled helpers, which take 20 s. Torch
        # reads this as it is imported, so that compiled engines start from nothing.
        env["TORCHDYNAMO_DISABLE"] = "1"
    context = multiprocessing.get_context("spawn" if compiled else "forkserver")
    if not compiled:
        context.set_forkserver_preload(["support.engine_worker"])
    process = context.Process(target=_work, args=(plan, result_file, log_file))
    with patch.dict(os.environ, env):
        process.start()
    process.join(_TIMEOUT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    if process.exitcode:
        raise EngineError(Path(log_file).read_text(errors="replace")[-20_000:])


def _work(plan: str, result_file: str, log_file: str) -> None:
    """First function of the engine's process."""
    with open(log_file, "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from support.engine_worker import run_plan

    run_plan(json.loads(plan), result_file)


def _read_round(arrays: Any, index: int, round_: Round) -> RoundResult:
    facts = json.loads(str(arrays[f"{index}/facts"]))
    prefix = f"{index}/layers/"
    return RoundResult(
        completions=[
            Completion(
                token_ids=facts["token_ids"][i],
                logits=arrays[f"{index}/{i}/logits"],
                prompt_logits=(
                    arrays[f"{index}/{i}/prompt_logits"]
                    if round_.prompt_logits
                    else None
                ),
                num_cached_tokens=facts["num_cached_tokens"][i],
            )
            for i in range(len(round_.prompts))
        ],
        steps=facts["steps"],
        preemptions=facts["preemptions"],
        kv_heads=facts["kv_heads"],
        layers={
            key.removeprefix(prefix): arrays[key]
            for key in arrays.files
            if key.startswith(prefix)
        },
    )
