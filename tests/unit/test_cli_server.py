"""The demo's server process: waited for, explained when it fails, never left behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.server import is_gone
from vllm_ascend_models.cli import server
from vllm_ascend_models.cli.console import CommandFailure
from vllm_ascend_models.cli.server import quick_start, running_server

# Stands in for `vllm`: what it does is the model's name. Its child ignores SIGTERM.
STUB = """\
import http.server, signal, subprocess, sys, time
model, port = sys.argv[2], int(sys.argv[6])
print("starting", model, flush=True)
if model == "dies":
    sys.exit(3)
program = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", program])
if model == "hangs":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path, monkeypatch) -> Path:
    stub = tmp_path / "vllm"
    stub.write_text(f"#!{sys.executable}\n{STUB}")
    stub.chmod(0o755)
    monkeypatch.setattr(server, "_vllm", lambda: str(stub))
    return stub


def test_a_healthy_server_is_stopped_with_its_children(stub, tmp_path):
    with running_server("works", log_path=tmp_path / "log") as running:
        assert running.base_url.startswith("http://127.0.0.1:")
    assert is_gone(running.pid)


def test_an_error_in_the_block_stops_the_server(stub, tmp_path):
    with (
        pytest.raises(RuntimeError),
        running_server("works", log_path=tmp_path / "log") as running,
    ):
        raise RuntimeError
    assert is_gone(running.pid)


def test_a_server_that_dies_is_explained_by_its_log(stub, tmp_path):
    with (
        pytest.raises(CommandFailure, match=r"(?s)exited with code 3.*starting dies"),
        running_server("dies", log_path=tmp_path / "log"),
    ):
        pass


def test_a_server_that_hangs_is_stopped_after_the_timeout(stub, tmp_path):
    waits: list[float] = []
    started = time.monotonic()
    with (
        pytest.raises(CommandFailure, match=r"(?s)not ready after 1 s.*starting hangs"),
        running_server(
            "hangs", log_path=tmp_path / "log", timeout=1, while_waiting=waits.append
        ),
    ):
        pass
    assert time.monotonic() - started < 10
    assert len(waits) >= 2


def test_without_vllm_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(server.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(CommandFailure, match="Install vLLM"),
        running_server("works", log_path=tmp_path / "log"),
    ):
        pass


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_demo_stops_its_server(stub, tmp_path, signal_number):
    # A shell starts what it runs in the background with SIGINT ignored.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from vllm_ascend_models.cli import demo, server;"
        f"server._vllm = lambda: {str(stub)!r};"
        "from contextlib import nullcontext;"
        "demo._model_directory = lambda: nullcontext('hangs');"
        "from vllm_ascend_models.cli.main import app; app(['demo'])"
    )
    demo = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    server_pid = wait_for_child(demo.pid)
    demo.send_signal(signal_number)
    assert demo.wait(30) != 0
    assert is_gone(server_pid)


def test_a_signal_while_the_server_is_started_stops_it(stub, tmp_path, monkeypatch):
    processes = []

    def interrupted_popen(*args, **kwargs):
        processes.append(popen(*args, **kwargs))
        signal.raise_signal(signal.SIGINT)
        return processes[0]

    popen = subprocess.Popen
    monkeypatch.setattr(server.subprocess, "Popen", interrupted_popen)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            running_server("hangs", log_path=tmp_path / "log", timeout=5),
        ):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert is_gone(processes[0].pid)


def wait_for_child(pid: int) -> int:
    """The pid of the first process that another one starts."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if pids := children.read_text().split():
            return int(pids[0])
        time.sleep(0.1)
    raise AssertionError(f"process {pid} started nothing in 60 s")


def test_quick_start_keeps_what_the_user_set():
    env = {"VLLM_CPU_KVCACHE_SPACE": "7", "PYTHONDONTWRITEBYTECODE": "1", "A": "b"}
    assert quick_start(env) == {"VLLM_CPU_KVCACHE_SPACE": "7", "A": "b"}
    assert quick_start({}) == {"VLLM_CPU_KVCACHE_SPACE": "1"}
