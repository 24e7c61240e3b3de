"""`vllm serve` on real devices: the tests of tests/ascend/test_server.py."""

from ascend.test_server import *  # noqa: F403
