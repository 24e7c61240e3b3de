"""Settings for the whole suite, and for every process that it starts."""

import os

# Two engines run at a time (`pytest -n 2`). vLLM would bind the threads of both to
# the same cores; instead each gets one thread, on whichever core is free.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
