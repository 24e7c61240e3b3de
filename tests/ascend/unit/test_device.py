"""aten on the emulated NPU gives what it gives on the CPU; graphs and logs see it."""

import json
import os
import subprocess
import sys

import pytest
import torch

if "NPU_EMULATOR_LIB" not in os.environ:
    pytest.skip(
        "the emulator is not built: `make test-ascend` builds it and runs this",
        allow_module_level=True,
    )

import torch_npu  # noqa: F401 - with it comes the emulator

from ascend.emulator.device import alias_on_host
from ascend.emulator.graph import ExternalEvent, NPUGraph, graph
from ascend.emulator.launch_log import Launch, launches

X = torch.arange(24.0).view(4, 6)
MASK = X % 5 == 0


def index_put(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[torch.tensor([0, 2], device=x.device), 1:3] = 7
    return y


def out_of_another_size(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, 1, out=torch.empty(0, device=x.device))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.t()[1:].mul_(2).add_(1)
    return y


OPERATIONS = {
    "arithmetic": lambda x: (x + 2) * x - x / 3,
    "bfloat16": lambda x: x.bfloat16() @ x.bfloat16().t(),
    "boolean mask": lambda x: x[MASK.to(x.device)],
    "cat": lambda x: torch.cat([x, x.flip(0)], 1),
    "cumsum": lambda x: x.cumsum(0),
    "embedding": lambda x: torch.embedding(x, torch.tensor([[3, 0]], device=x.device)),
    "gather": lambda x: x.gather(1, torch.tensor([[5], [0]], device=x.device)),
    "in place, on a view": in_place,
    "index_put": index_put,
    "max": lambda x: torch.cat([y.float() for y in x.max(1)]),
    "no elements": lambda x: x[:0] + 1,
    "not contiguous": lambda x: x.t()[::2].contiguous(),
    "out= of another size": out_of_another_size,
    "scatter": lambda x: x.scatter(1, torch.tensor([[2]], device=x.device), 9.0),
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: torch.cat([y.float() for y in x.sort(1, descending=True)]),
    "split": lambda x: torch.cat(x.split([1, 5], 1)[::-1], 1),
    "topk": lambda x: x.topk(2).values,
    "where": lambda x: torch.where(x > 5, x, -x),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_aten_computes_what_the_cpu_computes(operation):
    got = operation(X.npu())
    assert got.device.type == "npu"
    assert got.cpu().equal(operation(X))


def test_the_host_sees_the_devices_memory():
    x = X.npu()
    alias_on_host(x)[1, 2] = 99
    assert x[1, 2].item() == 99
    x.zero_()
    assert not alias_on_host(x).any()


def test_seeded_generators_repeat_and_differ():
    def sample(seed: int) -> list[float]:
        generator = torch.Generator(device="npu").manual_seed(seed)
        x = torch.empty(3, device="npu")
        return [*x.exponential_(generator=generator).tolist(), *x.uniform_().tolist()]

    assert sample(1)[:3] == sample(1)[:3]
    assert sample(1)[:3] != sample(2)[:3]


def swiglu(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.npu.npu_swiglu(x)


def exact_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def test_a_graph_replays_on_the_memory_that_it_was_captured_on():
    x, captured = X.npu(), NPUGraph()
    with graph(captured):
        y = swiglu(x * 0.1) + 1
    for factor in (1, -2):
        x.copy_(X * factor)
        captured.replay()
        assert torch.allclose(y.cpu(), exact_swiglu(X * factor * 0.1) + 1)


def test_a_task_update_replaces_the_arguments_of_a_captured_operator():
    x, other, captured = X.npu(), (X + 3).npu(), NPUGraph()
    with graph(captured):
        torch.npu.graph_task_group_begin(None)
        y = swiglu(x)
        task = torch.npu.graph_task_group_end(None)
        z = y * 2
    torch.npu.graph_task_update_begin(None, task)
    swiglu(other)
    torch.npu.graph_task_update_end(None)
    captured.replay()
    assert torch.allclose(z.cpu(), 2 * exact_swiglu(X + 3))


def test_a_replay_waits_for_an_event_and_goes_on_once_it_is_recorded():
    x, captured, event = X.npu(), NPUGraph(), ExternalEvent()
    with graph(captured):
        y = x + 1
        event.wait()
        z = y + 1
        event.reset()
    x.add_(10)
    captured.replay()
    assert y.cpu().equal(X + 11)
    assert z.cpu().equal(X + 2)
    event.record()
    assert z.cpu().equal(X + 12)
    assert not event.is_recorded


def test_the_launch_log_has_every_kernel_in_order_and_no_view():
    x = X.bfloat16().npu()
    with launches() as log:
        swiglu(x.view(2, 12)[:, :4])
        x.t().add_(1)
    assert log == [
        Launch("npu::npu_swiglu", [("bfloat16", [2, 4])]),
        Launch("aten::add_.Tensor", [("bfloat16", [6, 4])]),
    ]
    x.add_(1)
    assert len(log) == 2


def test_replays_are_in_the_launch_log():
    x, captured = X.npu(), NPUGraph()
    with graph(captured):
        swiglu(x + 1)
    with launches() as log:
        captured.replay()
    assert [launch.name for launch in log] == ["aten::add.Tensor", "npu::npu_swiglu"]


def test_each_process_writes_its_launches_to_a_file(tmp_path):
    program = "import torch, torch_npu; torch.ones(2, 3).npu().neg_()"
    env = os.environ | {"NPU_EMULATOR_LAUNCH_LOG": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    [file] = tmp_path.iterdir()
    launched = [json.loads(line) for line in file.read_text().splitlines()]
    assert {"name": "aten::neg_", "tensors": [["float32", [2, 3]]]} in launched
