"""Tests that need a real NPU: without one they are collected, and not run."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REASON = "not run: this machine has no NPU (/dev/davinci*)"

pytest.register_assert_rewrite(
    "ascend.test_demo",
    "ascend.test_llama31",
    "ascend.test_lora",
    "ascend.test_openelm",
    "ascend.test_parallel",
    "ascend.test_server",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    emulated = "NPU_EMULATOR_LIB" in os.environ
    there = any(Path("/dev").glob("davinci[0-9]*")) and not emulated
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.npu)
            if not there:
                item.add_marker(pytest.mark.skip(reason=REASON))
