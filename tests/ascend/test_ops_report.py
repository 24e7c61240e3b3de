"""The operator report on the emulated NPU: what is launched, and by which class."""

import json
from pathlib import Path

import pytest

from support.checkpoints import openelm_config
from support.llama import write_llama_checkpoint
from vllm_ascend_models.cli.ops import markdown
from vllm_ascend_models.ops.npu_kernels import KERNELS
from vllm_ascend_models.ops.report import Row, report

ROOT = Path(__file__).parents[2]
OPENELM = openelm_config(
    model_dim=256,
    head_dim=64,
    num_query_heads=[4, 8],
    num_kv_heads=[1, 2],
    ffn_multipliers=[0.5, 4.0],
)
# The copies that vllm-ascend makes; every other kernel is expected by name.
COPIES = {"aten::clone", "aten::copy_"}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return report(OPENELM)


def test_layers_launch_what_the_sources_say_and_nothing_else(rows: list[Row]):
    launched: dict[str, set[str]] = {}
    for row in rows:
        assert row.level == "emulated"
        assert row.problem is None
        launched.setdefault(row.vllm_class, set()).update(row.prefill, row.decode)
    for vllm_class, kernels in launched.items():
        assert kernels - COPIES == set(KERNELS[vllm_class]), vllm_class


def test_a_layer_launches_each_kernel_once(rows: list[Row]):
    in_layers = [row for row in rows if ".*." in row.component]
    counts = sum(row.count * sum(row.decode.values()) for row in in_layers)
    assert counts / 2 == 14  # as vllm-ascend's own Qwen3: see benchmarks/launches.py


def test_llamas_rope_is_ours(tmp_path: Path):
    write_llama_checkpoint(tmp_path, num_layers=1)
    rows = report(json.loads((tmp_path / "config.json").read_text()))
    [rope] = [row for row in rows if "rotary" in row.component]
    assert rope.used_class == "vllm_ascend_models.ops.rope.NPULlama3RotaryEmbedding"
    assert rope.decode == {"atb::_npu_rotary_embedding": 1}
    in_layers = [row for row in rows if ".*." in row.component]
    assert sum(row.count * sum(row.decode.values()) for row in in_layers) == 12


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readmes_table_is_this_report(rows: list[Row], readme: str):
    assert markdown(rows).split("\n", 1)[1] in (ROOT / readme).read_text()
