"""`demo`: from nothing to an answer of a served OpenELM, in one command."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from vllm_ascend_models.cli.console import (
    CommandFailure,
    check_installed,
    fail,
    print_json,
    stderr_console,
)
from vllm_ascend_models.cli.demo_model import read_summary, write_with_progress
from vllm_ascend_models.cli.server import RunningServer, running_server

QUESTION = "What is the capital of France, and what is it famous for?"
_MAX_TOKENS = 128
_SERVE_ARGS = (
    "--max-model-len",
    "2048",
    # Compiling thirty layers that all differ takes a CPU minutes, for one answer.
    "--enforce-eager",
)


@dataclass(frozen=True)
class DemoAnswer:
    """What the served model said, and how quickly."""

    model: str
    question: str
    answer: str
    completion_tokens: int
    tokens_per_second: float
    seconds_to_first_token: float
    seconds_to_ready: float


def command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text.")
    ] = False,
) -> None:
    """Serve a small real OpenELM with plain `vllm serve` and ask it a question.

    Writes the checkpoint of `demo-model` into vLLM's cache, starts a server on a
    free port, asks over the OpenAI API, and stops the server.

    Example: vllm-ascend-models demo
    """
    try:
        check_installed({"openai": "openai"})
        with _ending_on_sigterm(), _model_directory() as model:
            answer = _serve_and_ask(model)
    except (CommandFailure, OSError) as error:
        fail(error)
    if as_json:
        print_json(asdict(answer))
        return
    typer.echo(f"Question: {answer.question}")
    typer.echo(f"Answer: {answer.answer}")
    typer.echo(
        f"{answer.tokens_per_second:.1f} tokens per second, the first after "
        f"{answer.seconds_to_first_token * 1000:.0f} ms "
        f"({answer.completion_tokens} tokens)"
    )


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind the stack, as Ctrl-C does: the server must not outlive us."""

    def end(signal_number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _model_directory() -> Iterator[Path]:
    """The demo checkpoint: kept in vLLM's cache, or in a temporary directory."""
    cached = _cache_root() / "ascend_models" / "demo-openelm"
    if _is_writable(cached.parent):
        if read_summary(cached) is None:
            write_with_progress(cached)
        yield cached
        return
    with tempfile.TemporaryDirectory(prefix="vllm-ascend-models-") as scratch:
        model = Path(scratch) / "demo-openelm"
        write_with_progress(model)
        yield model


def _cache_root() -> Path:
    """Where vLLM caches, by its own rule (envs.VLLM_CACHE_ROOT)."""
    if configured := os.environ.get("VLLM_CACHE_ROOT"):
        return Path(configured).expanduser()
    platform_cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(platform_cache).expanduser() / "vllm"


def _is_writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def _serve_and_ask(model: Path) -> DemoAnswer:
    console = stderr_console()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vllm-ascend-models-") as scratch:
        log_path = Path(scratch) / "server.log"
        with console.status("starting `vllm serve`") as status:

            def show_elapsed(seconds: float) -> None:
                status.update(f"waiting for `vllm serve` to be ready: {seconds:.0f} s")

            with running_server(
                model,
                *_SERVE_ARGS,
                log_path=log_path,
                while_waiting=show_elapsed,
            ) as server:
                ready = time.monotonic() - started
                status.update("asking")
                answer = _ask(server, str(model), ready)
                status.update("stopping the server")
    return answer


def _ask(server: RunningServer, model: str, seconds_to_ready: float) -> DemoAnswer:
    """One greedy chat completion, streamed so that its speed can be seen.

    Raises:
        CommandFailure: the API answered with an error, or with no text.
    """
    import openai

    client = openai.OpenAI(
        base_url=f"{server.base_url}/v1",
        api_key="none",
        max_retries=0,
        # A proxy of the environment cannot reach this machine's loopback.
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )
    pieces: list[tuple[float, str]] = []
    completion_tokens = 0
    asked = time.monotonic()
    try:
        for chunk in client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=_MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices and (text := chunk.choices[0].delta.content):
                pieces.append((time.monotonic() - asked, text))
            if chunk.usage:
                completion_tokens = chunk.usage.completion_tokens
    except openai.OpenAIError as error:
        raise server.failure(f"did not answer ({error})") from error
    ended = time.monotonic() - asked
    if completion_tokens < 2 or not pieces:
        raise server.failure("answered with no text")
    first = pieces[0][0]
    return DemoAnswer(
        model=model,
        question=QUESTION,
        answer="".join(text for _, text in pieces).strip(),
        completion_tokens=completion_tokens,
        tokens_per_second=(completion_tokens - 1) / (ended - first),
        seconds_to_first_token=first,
        seconds_to_ready=seconds_to_ready,
    )
