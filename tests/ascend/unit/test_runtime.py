"""AscendCL on host memory, through torch_npu and by its functions; and the build."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ascend.emulator import build

MIB = 1 << 20
MEMORY = 64 * MIB
INVALID_DEVICE = 107001
NOT_SUPPORTED = 207000


def libraries() -> Path:
    """Where the built libraries are."""
    if "NPU_EMULATOR_LIB" not in os.environ:
        pytest.skip("the emulator is not built: make test-ascend builds it")
    return Path(os.environ["NPU_EMULATOR_LIB"]).parent


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a process of its own, on emulated NPUs."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries()), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process


# --- Through torch_npu ----------------------------------------------------------------

# torch_npu takes memory for tensors of 38 MiB in pieces of 2 MiB, or, with expandable
# segments, of 20 MiB: 40 MiB either way.
USE_OF_MEMORY = """
    import json
    import torch
    import torch_npu

    seen = {"start": torch.npu.mem_get_info(0)}
    tensor = torch.empty(1000, dtype=torch.float32, device="npu:0")
    seen["fresh"] = tensor.cpu().isnan().all().item()
    values = torch.arange(1000, dtype=torch.float32)
    seen["copied"] = tensor.copy_(values).cpu().equal(values)
    del tensor
    torch.npu.empty_cache()

    tensor = torch.empty(38 << 20, dtype=torch.int8, device="npu:0")
    seen["used"] = torch.npu.mem_get_info(0)
    seen["other"] = torch.npu.mem_get_info(1)
    try:
        torch.empty(38 << 20, dtype=torch.int8, device="npu:0")
        seen["error"] = "none"
    except torch.OutOfMemoryError as error:
        seen["error"] = str(error)
    on_other = torch.empty(38 << 20, dtype=torch.int8, device="npu:1")
    del tensor
    torch.npu.empty_cache()
    seen["freed"] = torch.npu.mem_get_info(0)
    tensor = torch.empty(38 << 20, dtype=torch.int8, device="npu:0")

    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    end.synchronize()
    seen["milliseconds"] = start.elapsed_time(end)
    with torch.npu.stream(torch.npu.Stream()) as stream:
        seen["pending"] = not torch.npu.current_stream().query()
    seen["name"] = torch.npu.get_device_name(0)
    print(json.dumps(seen))
"""


@pytest.fixture(scope="module", params=["False", "True"], ids="expandable={}".format)
def seen(request) -> dict:
    """What torch saw, with memory allocated plainly and through virtual addresses."""
    process = run_python(
        USE_OF_MEMORY,
        NPU_EMULATOR_DEVICES="2",
        NPU_EMULATOR_MEMORY=str(MEMORY),
        NPU_EMULATOR_SOC="Ascend910B4",
        PYTORCH_NPU_ALLOC_CONF=f"expandable_segments:{request.param}",
    )
    return json.loads(process.stdout.splitlines()[-1])


def test_fresh_memory_is_nan(seen):
    assert seen["fresh"]


def test_copies_arrive(seen):
    assert seen["copied"]


def test_all_memory_is_free_at_first(seen):
    assert seen["start"] == [MEMORY, MEMORY]


def test_memory_in_use_counts_on_its_own_device(seen):
    free, total = seen["used"]
    assert total == MEMORY
    assert free == MEMORY - 40 * MIB
    assert seen["other"] == [MEMORY, MEMORY]


def test_more_than_the_limit_is_out_of_memory(seen):
    assert "NPU out of memory. Tried to allocate" in seen["error"]


def test_freed_memory_counts_back(seen):
    assert seen["freed"] == [MEMORY, MEMORY]


def test_streams_and_events_are_done_at_once(seen):
    assert 0 <= seen["milliseconds"] < 1000
    assert not seen["pending"]


def test_the_chip_has_the_name_that_was_asked_for(seen):
    assert seen["name"] == "Ascend910B4"


# --- By AscendCL's own functions ------------------------------------------------------


def call_ascendcl(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = """
    from ctypes import *
    acl = CDLL("libascendcl.so")
    """
    return run_python(textwrap.dedent(start) + textwrap.dedent(code), **environment)


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 1),
        ({"NPU_EMULATOR_DEVICES": "0"}, 0),
        ({"NPU_EMULATOR_DEVICES": "3"}, 3),
        ({"NPU_EMULATOR_DEVICES": "4", "ASCEND_RT_VISIBLE_DEVICES": "2,3"}, 2),
        # CANN stops at the first entry that names no device.
        ({"NPU_EMULATOR_DEVICES": "2", "ASCEND_RT_VISIBLE_DEVICES": "1,2,0"}, 1),
        ({"NPU_EMULATOR_DEVICES": "2", "ASCEND_RT_VISIBLE_DEVICES": ""}, 0),
    ],
    ids=str,
)
def test_the_number_of_devices_is_the_variables(monkeypatch, variables, count):
    for name in "NPU_EMULATOR_DEVICES", "ASCEND_RT_VISIBLE_DEVICES":
        monkeypatch.delenv(name, raising=False)
    code = """
        count = c_uint32()
        assert acl.aclrtGetDeviceCount(byref(count)) == 0
        print(count.value, acl.aclrtSetDevice(count.value))
    """
    output = call_ascendcl(code, **variables).stdout
    assert output.split() == [str(count), str(INVALID_DEVICE)]


def test_a_copy_may_not_leave_its_destination():
    code = """
        acl.aclrtSetDevice(0)
        memory = c_void_p()
        assert acl.aclrtMalloc(byref(memory), c_size_t(8), 0) == 0
        print(acl.aclrtMemcpy(memory, c_size_t(8), b"123456789", c_size_t(9), 1))
        print(string_at(memory.value, 8).hex())
    """
    assert call_ascendcl(code).stdout.split() == ["100000", "ff" * 8]


def test_what_is_not_implemented_says_so_once():
    process = call_ascendcl("print(acl.aclopCreateAttr(), acl.aclopCreateAttr())")
    assert process.stdout.split() == [str(NOT_SUPPORTED)] * 2
    assert process.stderr == "[NPU emulator] aclopCreateAttr is not implemented\n"


# --- The build ------------------------------------------------------------------------


@pytest.fixture
def site_packages(tmp_path) -> Path:
    """A torch_npu of the right version for this Python, as far as the build checks."""
    directory = tmp_path / "site-packages"
    metadata = directory / f"torch_npu-{build.TORCH_NPU_VERSION}.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Name: torch-npu\nVersion: {build.TORCH_NPU_VERSION}\n")
    suffix = build.sysconfig.get_config_var("EXT_SUFFIX")
    (directory / "torch_npu").mkdir()
    (directory / f"torch_npu/_C{suffix}").touch()
    return directory


def test_a_build_needs_torch_npu(tmp_path):
    with pytest.raises(build.BuildError, match=r"torch_npu .* is not installed in"):
        build.build(tmp_path, tmp_path / "out")


def test_a_build_needs_the_right_torch_npu(site_packages, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "TORCH_NPU_VERSION", "2.99")
    with pytest.raises(build.BuildError, match=r"written for torch_npu 2\.99"):
        build.build(site_packages, tmp_path / "out")


def test_a_build_needs_the_python_of_torch_npu(site_packages, tmp_path):
    next((site_packages / "torch_npu").iterdir()).unlink()
    with pytest.raises(build.BuildError, match="was not built for this Python"):
        build.build(site_packages, tmp_path / "out")


def test_a_build_needs_a_compiler(site_packages, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="gcc was not found: install a C comp"):
        build.build(site_packages, tmp_path / "out")


def test_a_build_needs_disk(site_packages, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FREE_BYTES", 1 << 60)
    with pytest.raises(build.BuildError, match="MiB free: the build needs"):
        build.build(site_packages, tmp_path / "out")


def test_a_build_that_fails_leaves_nothing(site_packages, tmp_path):
    with pytest.raises(build.BuildError, match=r"gcc|g\+\+"):
        build.build(site_packages, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["site-packages"]


def test_what_is_built_is_not_built_again(site_packages, tmp_path, monkeypatch):
    (tmp_path / build.STAMP).write_text(build._stamp())
    monkeypatch.setenv("PATH", "")  # no compiler
    build.build(site_packages, tmp_path)


def test_a_changed_source_is_built_again(site_packages, tmp_path, monkeypatch):
    (tmp_path / build.STAMP).write_text("of other sources")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="gcc was not found"):
        build.build(site_packages, tmp_path)
