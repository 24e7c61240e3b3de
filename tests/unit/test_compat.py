"""`register()` is cheap, silent, idempotent, and never breaks another model."""

import logging
import subprocess
import sys
import types

import pytest

import vllm_ascend_models
from vllm_ascend_models import _compat


@pytest.fixture
def engine(monkeypatch):
    """Stand in for vLLM by a version alone; what it lacks makes registration fail."""
    monkeypatch.setattr(vllm_ascend_models, "_registered", False)

    def pretend(version):
        module = types.ModuleType("vllm")
        module.__version__ = version
        monkeypatch.setitem(sys.modules, "vllm", module)

    return pretend


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("version", ["0.17.1", "0.8.5.post1", "0.9.0rc1+cpu"])
def test_below_the_range_it_stands_down_with_one_line(engine, caplog, version):
    engine(version)
    vllm_ascend_models.register()
    [line] = lines(caplog)
    assert "stands down" in line
    assert version in line
    assert vllm_ascend_models.__version__ in line


@pytest.mark.parametrize("version", ["0.33.0", "1.0.0", "dev", "0.40.1.dev3+gabc"])
def test_above_the_range_it_goes_on_and_says_so(caplog, engine, version):
    engine(version)
    assert _compat.engine_is_supported("0.1.0")
    [line] = lines(caplog)
    assert "outside that range" in line
    assert version in line


@pytest.mark.parametrize("version", ["0.18.0", "0.23.0", "0.32.0", "0.32.5+cpu"])
def test_in_the_range_it_is_silent(caplog, engine, version):
    engine(version)
    assert _compat.engine_is_supported("0.1.0")
    assert lines(caplog) == []


def test_a_failure_is_one_error_line_and_no_exception(engine, caplog):
    engine("0.32.0")
    vllm_ascend_models.register()
    vllm_ascend_models.register()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "could not register" in record.getMessage()
    assert "Other models are not affected" in record.getMessage()


def test_import_loads_the_standard_library_only(tmp_path):
    code = (
        "import sys; before = set(sys.modules); import vllm_ascend_models; "
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(new - set(sys.stdlib_module_names) - {'vllm_ascend_models'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "set()\n", done.stderr
