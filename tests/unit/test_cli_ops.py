"""The command `ops`, as far as no engine starts."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity
from typer.testing import CliRunner

from vllm_ascend_models.cli import ops
from vllm_ascend_models.cli.main import app
from vllm_ascend_models.ops.npu_kernels import unsafe
from vllm_ascend_models.ops.report import Row
from vllm_ascend_models.ops.report_worker import Component, read_profile

OPENELM = {
    "architectures": ["OpenELMForCausalLM"],
    "model_type": "openelm",
    "model_dim": 1280,
    "num_transformer_layers": 16,
    "head_dim": 64,
    "num_gqa_groups": 4,
    "qkv_multipliers": [0.5, 1.0],
    "ffn_multipliers": [0.5, 4.0],
}
ROW = Row(
    component="layers.*.act",
    count=2,
    vllm_class="SiluAndMul",
    used_class="vllm.layers.SiluAndMul",
    prefill={"aten::silu": 1},
    decode={"aten::silu": 1},
    npu_kernels=["npu::npu_swiglu"],
    level="read",
    problem=None,
)


def test_every_distinct_layer_is_built_once():
    config = ops._distinct_layers(OPENELM)
    layers = zip(
        *(config["num_query_heads"], config["num_kv_heads"], config["ffn_multipliers"]),
        strict=True,
    )
    layers = list(layers)
    assert len(layers) == config["num_transformer_layers"] == len(set(layers))
    assert (layers[0], layers[-1]) == ((12, 3, 0.5), (20, 5, 4.0))
    equal = OPENELM | {"qkv_multipliers": 1.0, "ffn_multipliers": 4.0}
    assert ops._distinct_layers(equal)["num_transformer_layers"] == 1
    assert ops._distinct_layers({"model_type": "llama"})["num_hidden_layers"] == 1


def test_kernels_of_cuda_and_triton_are_unsafe():
    safe = ["aten::matmul", "npu::npu_swiglu", "atb::_npu_reshape_and_cache"]
    assert unsafe([*safe, "_C_ascend::npu_add_rms_norm_bias"]) == []
    bad = ["_C::silu_and_mul", "aten::triton_fused", "triton::rope"]
    assert unsafe([*safe, *bad]) == bad


def test_operators_with_a_kernel_of_their_own_are_counted():
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    component = Component("layer", "Linear", "torch.nn.Linear")
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiled:
        with torch.profiler.record_function("layer:layer"):
            layer(x).view(4, 2).T.tanh()
        x.exp()
    read_profile(profiled.events(), [component])
    assert component.calls == [{"aten::addmm": 1, "aten::tanh": 1}]


def invoke(monkeypatch, tmp_path, *options, rows=(ROW,), config=OPENELM):
    monkeypatch.setattr(ops, "report", lambda config: list(rows))
    (tmp_path / "config.json").write_text(json.dumps(config))
    return CliRunner().invoke(app, ["ops", str(tmp_path), *options])


def test_what_is_read_is_marked_so(monkeypatch, tmp_path):
    result = invoke(monkeypatch, tmp_path)
    assert result.exit_code == 0
    assert "act ×2" in result.stdout
    assert "npu_swiglu" in result.stdout
    assert "read ✓" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_prefill_that_launches_something_else_is_said(monkeypatch, tmp_path):
    launched = {"prefill": {"aten::mul": 3}, "decode": {"aten::mul": 1, "aten::add": 2}}
    row = Row(**vars(ROW) | launched | {"level": "emulated"})
    result = invoke(monkeypatch, tmp_path, "--markdown", rows=[row])
    assert "`1 mul, 3 in a prefill`, `2 add, 0 in a prefill`" in result.stdout


def test_a_layer_without_a_place_on_an_npu_is_exit_1(monkeypatch, tmp_path):
    bad = Row(**vars(ROW) | {"problem": "no NPU kernel is known"})
    result = invoke(monkeypatch, tmp_path, rows=[ROW, bad])
    assert result.exit_code == 1
    assert "no NPU kernel is" in result.stdout


def test_json_and_markdown_hold_the_rows(monkeypatch, tmp_path):
    result = invoke(monkeypatch, tmp_path, "--json")
    [row] = json.loads(result.stdout)["rows"]
    assert row["npu_kernels"] == ["npu::npu_swiglu"]
    result = invoke(monkeypatch, tmp_path, "--markdown")
    assert "| act ×2 | SiluAndMul | `npu_swiglu` | read |" in result.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no config.json"),
        ("{", "has no config.json to read"),
        (json.dumps(OPENELM | {"head_dim": 63}), "`head_dim` is 63"),
    ],
    ids=["none", "not JSON", "a bad field"],
)
def test_a_model_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, content, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = CliRunner().invoke(app, ["ops", str(tmp_path)])
    assert result.exit_code == 1
    assert said in result.stderr
    assert "Traceback" not in result.output
