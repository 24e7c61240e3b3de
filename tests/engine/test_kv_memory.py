"""Each layer keeps its own KV heads: nothing is padded to the widest layer."""

import json
import os
import subprocess
import sys

import pytest

from support.checkpoints import TINY, true_geometry, write_openelm_checkpoint

# Read from the running engine: what it allocated, and what each layer got of it.
MEASURE = """
import json, sys
from vllm import LLM

llm = LLM(
    sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype=sys.argv[2],
    max_model_len=256,
)
core = llm.llm_engine.engine_core.engine_core
runner = core.model_executor.driver_worker.worker.model_runner
block_size = core.vllm_config.cache_config.block_size
tokens = runner.kv_cache_config.num_blocks * block_size
storages = [cache.untyped_storage() for cache in runner.kv_caches]
allocated = {storage.data_ptr(): storage.nbytes() for storage in storages}
print("MEASURED", json.dumps({
    "allocated": sum(allocated.values()) / tokens,
    "layers": [x.numel() * x.element_size() / tokens for x in runner.kv_caches],
}))
"""


def measure(checkpoint, dtype):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(checkpoint), dtype],
        env=os.environ
        | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        },
        cwd=checkpoint,
        capture_output=True,
        text=True,
    )
    [line] = [x for x in done.stdout.splitlines() if x.startswith("MEASURED")] or [""]
    assert line, done.stderr[-3000:]
    return json.loads(line.removeprefix("MEASURED"))


@pytest.mark.parametrize(
    ("config", "dtype", "bytes_per_element"),
    [(TINY, "float32", 4), (true_geometry("270M", 3), "bfloat16", 2)],
    ids=["tiny", "270M"],
)
def test_the_engine_keeps_exactly_the_layers_own_kv(
    tmp_path, config, dtype, bytes_per_element
):
    write_openelm_checkpoint(tmp_path, config)
    measured = measure(tmp_path, dtype)
    each = [
        2 * kv * config["head_dim"] * bytes_per_element for kv in config["num_kv_heads"]
    ]
    assert measured["layers"] == each
    assert measured["allocated"] == sum(each)
