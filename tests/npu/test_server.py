"""`vllm serve` on real devices: the tests of tests/ascend that go over HTTP."""

from ascend.test_lora import *  # noqa: F403
from ascend.test_server import *  # noqa: F403
