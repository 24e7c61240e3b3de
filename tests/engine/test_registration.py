"""The plugin is in every process of vLLM, and costs it nothing that it had not.

Seen on engines with two workers, which share each layer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import openelm_config, write_openelm_checkpoint
from support.reference import reference_logits

PROBE = Path(__file__).parent.parent / "support" / "probe"

# Heads that two devices can share, so that there are workers to look into.
SPLITTABLE = openelm_config(
    model_dim=64,
    head_dim=32,
    num_query_heads=[4, 8],
    num_kv_heads=[2, 4],
    ffn_multipliers=[1.0, 2.0],
    ffn_dim_divisor=64,
)

GENERATE = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=64, tensor_parallel_size=2, distributed_executor_backend="mp",
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False
    )
    [answer] = llm.generate([{"prompt_token_ids": [1, 5, 9]}], greedy)
    print("TOKENS", list(answer.outputs[0].token_ids))
"""


def reports(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def greedy_tokens(tensors, prompt, count):
    token_ids = list(prompt)
    for _ in range(count):
        logits = reference_logits(SPLITTABLE, tensors, token_ids)
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :]


@pytest.fixture(scope="module", params=["fork", "spawn"])
def run(request, tmp_path_factory):
    """An engine with two workers, started from a directory that is not ours."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    tensors = write_openelm_checkpoint(elsewhere / "checkpoint", SPLITTABLE)
    script, probe_file = elsewhere / "generate.py", elsewhere / "probe.jsonl"
    script.write_text(GENERATE)
    done = subprocess.run(
        [sys.executable, str(script), str(elsewhere / "checkpoint")],
        cwd=elsewhere,
        env=os.environ
        | {
            "PYTHONPATH": str(PROBE),
            "PROBE_FILE": str(probe_file),
            # An empty cache, so that vLLM inspects the model class.
            "VLLM_CACHE_ROOT": str(elsewhere / "cache"),
            "VLLM_WORKER_MULTIPROCESSING_METHOD": request.param,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = greedy_tokens(tensors, [1, 5, 9], 8)
    return reports(probe_file), done.stdout + done.stderr, expected


def test_two_workers_answer_as_the_reference_does(run):
    assert f"TOKENS {run[2]}" in run[1]


def test_user_inspection_engine_and_worker_processes_register(run):
    scripts = [Path(report["argv"][0]).name for report in run[0]]
    processes = {report["process"] for report in run[0]}
    assert "registry.py" in scripts  # vLLM inspects a model class in a subprocess
    assert "MainProcess" in processes
    assert sum("Worker" in name for name in processes) == 2, processes
    assert any("Engine" in name for name in processes), processes


def test_register_loads_our_own_light_modules_only(run):
    light = {
        "vllm_ascend_models._compat",
        "vllm_ascend_models.openelm",
        "vllm_ascend_models.openelm.arch_convertor",
        "vllm_ascend_models.openelm.config",
        "vllm_ascend_models.openelm.geometry",
        "vllm_ascend_models.openelm.registration",
        "vllm_ascend_models.ops",
        "vllm_ascend_models.ops.npu",
    }
    for report in run[0]:
        assert set(report["loaded"]) <= light, report["argv"]
        assert not report["model"]
        assert not report["torch_npu"]
        assert report["oracles"] == []


def test_the_installed_package_is_what_registers(run):
    for report in run[0]:
        assert "site-packages" in report["file"]


def test_nothing_is_logged_where_all_is_well(run):
    assert "could not register" not in run[1]
    assert "outside that range" not in run[1]
