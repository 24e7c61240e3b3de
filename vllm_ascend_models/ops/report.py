"""Which kernels a model's layers launch here, and whether NPUs have them."""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_ascend_models.ops.npu_kernels import KERNELS, unsafe

_WORKER = "vllm_ascend_models.ops.report_worker"


class ReportFailure(Exception):
    """The model could not be built; the message holds the end of what was said."""


@dataclass(frozen=True)
class Row:
    """Layers of a model that are of one kind and launch the same.

    Attributes:
        component: their name in the model, with * for the number of a layer.
        count: how often they are called in a step, all together.
        vllm_class: the layer of vLLM.
        used_class: the class that is used in its place, with its module.
        prefill: kernels of one call with several tokens, and how often.
        decode: kernels of one call with one token, and how often.
        npu_kernels: what an NPU launches for such a layer; empty if we know of none.
        level: ``read``: `npu_kernels` is from vllm-ascend's sources, and the counts are
            this platform's. ``emulated`` or ``device``: the counts are an NPU's.
        problem: why it does not belong on an NPU; None if it does.
    """

    component: str
    count: int
    vllm_class: str
    used_class: str
    prefill: dict[str, int]
    decode: dict[str, int]
    npu_kernels: list[str]
    level: str
    problem: str | None


def report(config: dict[str, Any]) -> list[Row]:
    """Build the model of a config.json with dummy weights, and run it once.

    Args:
        config: what config.json says; the fewer layers, the quicker.

    Raises:
        ReportFailure: the engine did not start or did not answer.
    """
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "config.json").write_text(json.dumps(config))
        result = scratch / "result.json"
        env = os.environ | {
            "NPU_EMULATOR_LAUNCH_LOG": str(scratch / "launches"),
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        done = subprocess.run(
            [sys.executable, "-m", _WORKER, str(scratch), str(result)],
            env=env,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise ReportFailure(f"The model could not be run:\n{said}")
        found = json.loads(result.read_text())
    level = "read"
    if found["device"] == "npu":
        level = "emulated" if "NPU_EMULATOR_LIB" in os.environ else "device"
    return _rows(found["components"], level)


def _rows(components: list[dict[str, Any]], level: str) -> list[Row]:
    rows: dict[str, Row] = {}
    for component in components:
        # The logits processor uses a head without calling it; and between the layers
        # of most models nothing is launched.
        if any(component["calls"]):
            row = _row(component, level)
            kind = json.dumps([row.component, row.used_class, row.prefill, row.decode])
            earlier = rows[kind].count if kind in rows else 0
            rows[kind] = replace(row, count=row.count + earlier)
    return list(rows.values())


def _row(component: dict[str, Any], level: str) -> Row:
    prefill, decode = component["calls"][0], component["calls"][-1]
    is_layer = bool(component["name"])
    kernels = list(KERNELS.get(component["vllm_class"], ()))
    problem = None
    if level == "read":
        if is_layer and not kernels:
            problem = "no NPU kernel is known for this class"
    elif bad := unsafe(prefill | decode):
        problem = f"not a kernel of NPUs: {', '.join(bad)}"
    return Row(
        component=re.sub(r"\.\d+\.", ".*.", component["name"]) or "between the layers",
        count=len(component["calls"]) // 2,
        vllm_class=component["vllm_class"],
        used_class=component["used_class"],
        prefill=prefill,
        decode=decode,
        npu_kernels=kernels,
        level=level,
        problem=problem,
    )
