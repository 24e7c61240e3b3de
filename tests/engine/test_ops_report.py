"""The operator report on the CPU: layers run here, an NPU's kernels from sources."""

import json
import subprocess
import sys

from support.checkpoints import TINY
from vllm_ascend_models.ops.npu_kernels import KERNELS

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 2,
    "n_layer": 1,
    "vocab_size": 512,
    "torch_dtype": "float32",
}


def ops(directory, config):
    """Exit code and rows of the installed command."""
    (directory / "config.json").write_text(json.dumps(config))
    command = "from vllm_ascend_models.cli.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", command, "ops", str(directory), "--json"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["rows"]


def test_an_openelm_has_a_place_on_npus_for_every_layer(tmp_path):
    code, rows = ops(tmp_path, TINY)
    assert code == 0
    by_name = {row["component"].rpartition(".*.")[2]: row for row in rows}
    classes = {name: row["vllm_class"] for name, row in by_name.items()}
    assert classes == {
        "transformer.token_embeddings": "VocabParallelEmbedding",
        "attn.qkv_proj": "QKVParallelLinear",
        "attn.out_proj": "RowParallelLinear",
        "attn.q_norm": "RMSNorm",
        "attn.k_norm": "RMSNorm",
        "attn.rotary_emb": "RotaryEmbedding",
        "attn.attn": "Attention",
        "ffn.proj_1": "MergedColumnParallelLinear",
        "ffn.act_fn": "SiluAndMul",
        "ffn.proj_2": "RowParallelLinear",
        "attn_norm": "RMSNorm",
        "ffn_norm": "RMSNorm",
        "transformer.norm": "RMSNorm",
        "logits_processor": "LogitsProcessor",
    }
    assert all(row["level"] == "read" for row in rows)
    for row in by_name.values():
        assert row["npu_kernels"] == list(KERNELS[row["vllm_class"]])
    # All of TINY's layers differ, and share one rotary embedding.
    assert by_name["attn.qkv_proj"]["count"] == 4
    assert by_name["attn.rotary_emb"]["count"] == 4


def test_a_layer_of_which_no_npu_kernel_is_known_fails_the_report(tmp_path):
    code, rows = ops(tmp_path, GPT2)
    assert code == 1
    problems = {row["vllm_class"] for row in rows if row["problem"]}
    assert problems & {"NewGELU", "LayerNorm"}
