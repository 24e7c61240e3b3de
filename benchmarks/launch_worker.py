"""One engine on the emulated NPU: prints the kernels of one decode step, as JSON.

Started by `launches.py`. The step is what one more token costs.
"""

import json
import sys
from collections import Counter

from vllm import LLM, SamplingParams

from ascend.emulator.launch_log import launches


def main(model: str) -> None:
    """Generate two tokens, then three, and print the difference of their kernels."""
    llm = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        kv_cache_memory_bytes=8 << 20,
    )
    counts = []
    for max_tokens in (2, 3):
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        with launches() as log:
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
        counts.append(Counter(launch.name for launch in log))
    counts[1].subtract(counts[0])
    print("KERNELS", json.dumps(counts[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
