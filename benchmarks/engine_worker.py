"""An engine that waits: reads one JSON task a line, writes one JSON answer a line.

Started twice by `openelm_vs_llama.py`, so that two engines can be measured in turns.
"""

import json
import os
import sys
import time
from typing import Any


def measure(llm: Any, batch: int, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds to answer ``batch`` prompts that share no prefix."""
    from vllm import SamplingParams

    measure.calls += 1  # type: ignore[attr-defined]
    prompts = [
        {
            "prompt_token_ids": [
                3 + (7919 * measure.calls + 104729 * row + 31 * i) % 40000  # type: ignore[attr-defined]
                for i in range(prompt_tokens)
            ]
        }
        for row in range(batch)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start


measure.calls = 0  # type: ignore[attr-defined]


def kv_bytes_per_token(llm: Any) -> int:
    """Bytes of KV cache that the engine allocated for each token, over all layers."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    storages = (cache.untyped_storage() for cache in runner.kv_caches)
    allocated = sum({x.data_ptr(): x.nbytes() for x in storages}.values())
    block_size = core.vllm_config.cache_config.block_size
    return allocated // (runner.kv_cache_config.num_blocks * block_size)


def main() -> None:
    """Answer tasks until standard input ends."""
    # vLLM logs to standard output: keep that for its log, answer on a copy.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(sys.argv[1], max_model_len=2048, max_num_seqs=16)
    answers.write(json.dumps(kv_bytes_per_token(llm)) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(measure(llm, **json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
