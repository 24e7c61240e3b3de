"""An engine that waits: reads one JSON task a line, writes one JSON answer a line.

Started twice by `openelm_vs_llama.py`, so that two engines can be measured in turns.
"""

import json
import os
import sys
import time
from typing import Any


def measure(
    llm: Any, turn: int, batch: int, prompt_tokens: int, output_tokens: int
) -> float:
    """Seconds to answer ``batch`` prompts, which share no prefix with any before."""
    from vllm import SamplingParams

    prompts = [
        {
            "prompt_token_ids": [
                3 + (7919 * turn + 104729 * row + 31 * i) % 40000
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


def main() -> None:
    """Answer tasks until standard input ends."""
    # vLLM logs to standard output: keep that for its log, answer on a copy.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[1]), max_model_len=2048, max_num_seqs=16)
    answers.write(json.dumps("ready") + "\n")
    answers.flush()
    for turn, line in enumerate(sys.stdin):
        answers.write(json.dumps(measure(llm, turn, **json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
