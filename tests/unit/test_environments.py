"""What `environments/run.py` says on a machine that cannot build an environment."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "environments" / "run.py"


@pytest.fixture
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def says(capsys: pytest.CaptureFixture[str], ended: pytest.ExceptionInfo) -> str:
    """The error of a run that ended with exit code 1."""
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    return error


def test_an_unknown_engine_is_a_usage_error_that_lists_them(run, capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(["0.1.0"])
    assert ended.value.code == 2
    assert "0.32.0,0.23.0,0.18.0,ascend" in capsys.readouterr().err


def test_another_python_is_refused_by_version(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    with pytest.raises(SystemExit) as ended:
        run.main(["0.32.0"])
    assert "Python 3.11 or 3.12 is needed" in says(capsys, ended)


def test_no_compiler_is_said_with_the_command_that_installs_one(
    run, capsys, monkeypatch
):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit) as ended:
        run.check_machine({"disk_gib": 0})
    assert "apt-get install g++" in says(capsys, ended)


def test_too_little_disk_is_said_with_how_much_is_needed(run, capsys):
    with pytest.raises(SystemExit) as ended:
        run.check_machine({"disk_gib": 10**9})
    assert "1000000000 GiB of disk are needed" in says(capsys, ended)


def test_a_step_that_fails_shows_the_end_of_what_it_printed(run, capsys):
    program = "print('why it failed'); raise SystemExit(3)"
    with pytest.raises(SystemExit) as ended:
        run.step("building", "something", [sys.executable, "-c", program])
    error = capsys.readouterr().err
    assert ended.value.code == 1
    assert "error: building something failed:\nwhy it failed" in error
