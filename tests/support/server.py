"""Run `vllm serve` for a test, and talk to it as its users do."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai

from vllm_ascend_models.cli.server import quick_start, running_server

# The package that is installed, not the folder in the current directory; and no
# network, which a test must not need.
_ENV = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# `--enforce-eager` alone leaves vLLM's compiled helpers, which take 20 s.
_EAGER_ENV = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Server:
    """A healthy server.

    Attributes:
        base_url: without ``/v1``.
        model: the name under which it serves.
        client: OpenAI's client, without retries, which would hide failures.
        log_path: what the server prints; there until the block ends.
        pid: of the server, and of its process group.
    """

    base_url: str
    model: str
    client: openai.OpenAI
    log_path: Path
    pid: int


@contextmanager
def serve(
    model_dir: Path, *args: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve a checkpoint for the time of a block, on a free port of this machine.

    Args:
        model_dir: the checkpoint.
        *args: further arguments of ``vllm serve``.
        env: environment variables, on top of this process's.

    Raises:
        CommandFailure: the server died, or was not healthy in time; the message holds
            the end of its log.
    """
    variables = quick_start(os.environ) | _ENV
    if "--enforce-eager" in args:
        variables |= _EAGER_ENV
    with tempfile.TemporaryDirectory() as scratch:
        log_path = Path(scratch) / "server.log"
        with running_server(
            model_dir, *args, log_path=log_path, env=variables | dict(env or {})
        ) as server:
            client = openai.OpenAI(
                base_url=f"{server.base_url}/v1",
                api_key="none",
                max_retries=0,
                http_client=openai.DefaultHttpxClient(trust_env=False),
            )
            yield Server(server.base_url, str(model_dir), client, log_path, server.pid)


def is_gone(process_group: int) -> bool:
    """Whether every process of a group has ended, which a kill takes a moment for."""
    deadline = time.monotonic() + 5
    while _is_alive(process_group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _is_alive(process_group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name in brackets: state, parent, process group.
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group) == process_group and state != "Z":
            return True
    return False
