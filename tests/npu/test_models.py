"""The models of tests/ascend on a real device: the same tests, the same bounds.

In vllm-ascend's image, with this package installed: ``pytest -m npu tests/npu``.
"""

from ascend.test_demo import *  # noqa: F403
from ascend.test_llama31 import *  # noqa: F403
from ascend.test_openelm import *  # noqa: F403
from ascend.test_parallel import *  # noqa: F403
