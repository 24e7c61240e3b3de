"""What needs the emulator is not collected without it, and says so."""

import os
from pathlib import Path

import pytest

# torch_npu counts the devices once, in the process that engines are forked from.
os.environ.setdefault("NPU_EMULATOR_DEVICES", "8")

HERE = Path(__file__).parent
REASON = "the emulator is not built: `make test-ascend` builds it and runs this"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("NPU_EMULATOR_LIB"):
        return
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.skip(reason=REASON))
