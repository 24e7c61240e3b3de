"""Build the emulator's libraries for the torch_npu of one environment.

``build(site_packages, out)`` leaves in ``out``:

- ``libascendcl.so``: ``runtime/``'s AscendCL, and a stub that reports itself for every
  symbol that torch_npu's libraries want and nothing defines;
- ``libhccl.so``: ``runtime/``'s HCCL;
- an empty library for every other CANN library that torch_npu is linked against;
- ``libnpu_emulator.so``: ``device.cpp``, which runs aten operators on device memory.

Run as a program, ``build.py OUT`` builds for the environment of the Python that runs
it. It needs the standard library, a C and a C++ compiler and binutils.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path

TORCH_NPU_VERSION = "2.10.0.post4"
DEVICE_LIBRARY = "libnpu_emulator.so"

HERE = Path(__file__).resolve().parent
ASCENDCL_SOURCES = ("ascendcl", "device", "memory", "virtual_memory", "stream")
HCCL_SOURCES = ("hccl", "communicator", "exchange", "reduction")
NEEDED_TOOLS = {
    "gcc": "a C compiler",
    "g++": "a C++ compiler",
    "nm": "binutils",
    "readelf": "binutils",
}
FREE_BYTES = 1 << 30
STAMP = "stamp"
# Most parameters go unused where an operation has nothing to do.
C_FLAGS = ["-std=gnu11", "-O2", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]


class BuildError(Exception):
    """What is missing or failed, and what to do."""


def build(site_packages: Path, out: Path) -> None:
    """Build the libraries for ``site_packages`` into the directory ``out``.

    Returns at once where they were already built from the same sources. ``out`` changes
    in one step, when everything is done.

    Raises:
        BuildError: a tool, the right torch_npu or disk space is missing, or a compiler
            failed.
    """
    _check_torch_npu(site_packages)
    stamp = _stamp()
    if (out / STAMP).is_file() and (out / STAMP).read_text() == stamp:
        return
    _check_tools()
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(out.parent)
    # Beside `out`, since a rename cannot cross file systems.
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as work:
        new = Path(work) / "new"
        new.mkdir()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            device = pool.submit(_build_device_library, site_packages, new)
            _build_runtime(site_packages, new, Path(work), pool)
            device.result()
        (new / STAMP).write_text(stamp)
        if out.exists():
            out.rename(Path(work) / "old")
        new.rename(out)


# --- Requirements ---------------------------------------------------------------------


def _check_torch_npu(site_packages: Path) -> None:
    installed = distributions(name="torch_npu", path=[str(site_packages)])
    found = next((distribution.version for distribution in installed), None)
    wanted = f"torch_npu {TORCH_NPU_VERSION}"
    if found is None:
        raise BuildError(f"{wanted} is not installed in {site_packages}")
    if found != TORCH_NPU_VERSION:
        raise BuildError(
            f"torch_npu {found} is installed in {site_packages}: the emulator is "
            f"written for {wanted}"
        )
    extension = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not (site_packages / "torch_npu" / extension).is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"torch_npu in {site_packages} was not built for this Python, {version}: "
            f"it has no {extension}. Use the Python of that environment"
        )


def _check_tools() -> None:
    for tool, package in NEEDED_TOOLS.items():
        if shutil.which(tool) is None:
            raise BuildError(
                f"{tool} was not found: install {package} "
                "(Debian and Ubuntu: apt-get install build-essential)"
            )


def _check_disk(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < FREE_BYTES:
        raise BuildError(
            f"{directory} has {free >> 20} MiB free: the build needs "
            f"{FREE_BYTES >> 20} MiB"
        )


def _stamp() -> str:
    """Of the sources, this file and the version of torch_npu, which fixes torch's."""
    digest = hashlib.sha256(TORCH_NPU_VERSION.encode())
    digest.update(sys.version.encode())
    sources = [
        *sorted((HERE / "runtime").iterdir()),
        HERE / "device.cpp",
        HERE / "build.py",
    ]
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


# --- The runtime libraries ------------------------------------------------------------


def _build_runtime(
    site_packages: Path, out: Path, work: Path, pool: ThreadPoolExecutor
) -> None:
    """libascendcl.so, libhccl.so and the empty libraries, into ``out``."""
    headers = site_packages / "torch_npu/include/third_party/acl/inc"

    def compile_source(name: str) -> Path:
        target = work / f"{name}.o"
        source = HERE / "runtime" / f"{name}.c"
        _run("gcc", *C_FLAGS, f"-isystem{headers}", "-c", source, "-o", target)
        return target

    objects = dict(
        zip(
            ASCENDCL_SOURCES + HCCL_SOURCES,
            pool.map(compile_source, ASCENDCL_SOURCES + HCCL_SOURCES),
            strict=True,
        )
    )
    libraries = _torch_npu_libraries(site_packages)
    needed = _needed_libraries(libraries)
    present = {path.name for path in _environment_libraries(site_packages)}
    system = _system_libraries(needed - present)
    defined = _symbols(
        [*_environment_libraries(site_packages), *system.values(), *objects.values()],
        "--defined-only",
        pool,
    )
    missing = _symbols(libraries, "--undefined-only", pool) - defined

    stubs = work / "stubs.c"
    stubs.write_text(_stub_source(missing))
    _link(out / "libascendcl.so", [*(objects[n] for n in ASCENDCL_SOURCES), stubs])
    uses_ascendcl = [f"-L{out}", "-Wl,--no-as-needed", "-lascendcl"]
    _link(out / "libhccl.so", [*(objects[n] for n in HCCL_SOURCES), *uses_ascendcl])
    empty = work / "empty.c"
    empty.write_text("extern int npu_emulator_empty;\n")
    for name in needed - present - set(system) - {"libascendcl.so", "libhccl.so"}:
        _link(out / name, [empty, *uses_ascendcl])


def _torch_npu_libraries(site_packages: Path) -> list[Path]:
    package = site_packages / "torch_npu"
    return [
        *package.glob("*.so"),
        *package.glob("lib/*.so"),
        *package.rglob("core/*.so"),
    ]


def _environment_libraries(site_packages: Path) -> list[Path]:
    """torch_npu's own libraries and those it is installed with."""
    return [
        *_torch_npu_libraries(site_packages),
        *site_packages.glob("torch_npu.libs/*.so*"),
        *site_packages.glob("torch/lib/*.so*"),
    ]


def _needed_libraries(libraries: Iterable[Path]) -> set[str]:
    listing = _run("readelf", "--dynamic", "--wide", *libraries)
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", listing))


def _system_libraries(names: Iterable[str]) -> dict[str, Path]:
    """Those of the names that the compiler finds on this machine."""
    paths = {
        name: Path(_run("gcc", f"-print-file-name={name}").strip()) for name in names
    }
    # gcc answers a name that it does not find with the name itself.
    return {name: path for name, path in paths.items() if path.is_absolute()}


def _symbols(files: list[Path], which: str, pool: ThreadPoolExecutor) -> set[str]:
    """Names that the files define or want, without weak ones and CPython's own."""

    def of_file(path: Path) -> list[str]:
        dynamic = [] if path.suffix == ".o" else ["--dynamic"]
        listing = _run("nm", "--format=posix", *dynamic, which, path)
        entries = (line.split()[:2] for line in listing.splitlines())
        return [name.split("@")[0] for name, kind in entries if kind not in "wv"]

    names = {name for found in pool.map(of_file, files) for name in found}
    return {name for name in names if not re.match("_?Py", name)}


def _stub_source(symbols: Iterable[str]) -> str:
    """C source of a stub for each symbol."""
    lines = ["int report_unimplemented(const char *name, int *reported);"]
    for symbol in sorted(symbols):
        if re.match("_ZT[VIS]", symbol):  # vtables and type information are data
            lines.append(f"void *{symbol}[64];")
        else:
            lines.append(
                f"int {symbol}(void) {{ static int reported; "
                f'return report_unimplemented("{symbol}", &reported); }}'
            )
    return "\n".join(lines) + "\n"


def _link(library: Path, inputs: Iterable[Path | str]) -> None:
    soname = f"-Wl,-soname,{library.name}"
    flags = ["-shared", "-fPIC", soname, "-Wl,-rpath,$ORIGIN"]
    _run("gcc", *flags, *inputs, "-lpthread", "-lrt", "-lm", "-o", library)


# --- The device library ---------------------------------------------------------------


def _build_device_library(site_packages: Path, out: Path) -> None:
    torch = site_packages / "torch"
    includes = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    ]
    _run(
        "g++",
        *["-std=c++20", "-O1", "-fPIC", "-shared"],
        *(f"-isystem{path}" for path in includes),
        HERE / "device.cpp",
        f"-L{torch / 'lib'}",
        *["-ltorch", "-ltorch_cpu", "-lc10"],
        "-o",
        out / DEVICE_LIBRARY,
    )


def _run(*command: str | Path) -> str:
    """Standard output of the command; a BuildError with its last words if it fails."""
    words = [str(word) for word in command]
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode != 0:
        last_words = "\n".join(result.stderr.splitlines()[-20:])
        raise BuildError(f"{' '.join(words)}\nfailed:\n{last_words}")
    return result.stdout


def main() -> int:
    """Build for this Python's environment; the exit code."""
    if len(sys.argv) != 2:
        print("usage: build.py OUT", file=sys.stderr)
        return 2
    try:
        build(Path(sysconfig.get_paths()["purelib"]), Path(sys.argv[1]).absolute())
    except BuildError as error:
        print(f"The emulator was not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
