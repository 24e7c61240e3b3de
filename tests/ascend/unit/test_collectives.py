"""HCCL on shared memory: what torch.distributed's "hccl" backend gives every rank.

Each rank is a process of its own (collectives_rank.py). One launch for a number of
ranks runs all operations; a test reads what one of them gave.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ascend.unit import collectives_rank
from ascend.unit.collectives_rank import LARGE, TIMEOUT_SECONDS, TYPES, of_rank


def summed(ranks: int, count: int, dtype: str = "float32") -> np.ndarray:
    """The sum over ranks in fp64, in their order, rounded once."""
    inputs = [of_rank(rank, count, dtype) for rank in range(ranks)]
    if dtype == "int64":
        return np.sum(inputs, axis=0)
    total = np.zeros(count)
    for values in inputs:
        total += values.astype(np.float64)
    return total.astype(np.float32)


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def results(request, tmp_path_factory) -> list[dict[str, np.ndarray]]:
    """What each rank got, by operation."""
    if "NPU_EMULATOR_LIB" not in os.environ:
        pytest.skip("the emulator is not built: make test-ascend builds it")
    ranks = request.param
    directory = tmp_path_factory.mktemp("ranks")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(Path(os.environ["NPU_EMULATOR_LIB"]).parent),
        "NPU_EMULATOR_DEVICES": str(ranks),
        "NPU_EMULATOR_MEMORY": str(256 << 20),
        "OMP_NUM_THREADS": "1",
        # Else torch_npu's watchdog ends a process whose communicator broke, which
        # would be before it has saved what it saw.
        "HCCL_ASYNC_ERROR_HANDLING": "0",
    }
    program = collectives_rank.__file__
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(ranks), str(directory)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            errors = process.communicate(timeout=300)[1]
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [dict(np.load(directory / f"{rank}.npz")) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", TYPES)
def test_all_reduce_sums(results, dtype):
    expected = summed(len(results), 1000, dtype)
    for of_one in results:
        np.testing.assert_array_equal(of_one[f"all_reduce sum {dtype}"], expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_all_reduce_takes_the_maximum(results, dtype):
    inputs = [of_rank(rank, 1000, dtype) for rank in range(len(results))]
    for of_one in results:
        np.testing.assert_array_equal(
            of_one[f"all_reduce max {dtype}"], np.max(inputs, axis=0)
        )


def test_a_sum_is_rounded_once(results):
    # Two of the small terms make 13/16 of bfloat16's step at 1, one makes 13/32.
    expected = 1.0 + 2**-7 if len(results) == 3 else 1.0
    for of_one in results:
        assert of_one["rounded once"] == expected


def test_all_reduce_of_more_than_a_slot(results):
    for of_one in results:
        np.testing.assert_array_equal(
            of_one["all_reduce large"], summed(len(results), LARGE)
        )


def test_reduce_scatter_gives_each_rank_its_part(results):
    ranks = len(results)
    parts = summed(ranks, LARGE * ranks).reshape(ranks, LARGE)
    for of_one, part in zip(results, parts, strict=True):
        np.testing.assert_array_equal(of_one["reduce_scatter"], part)


def test_all_gather_joins_the_ranks_in_order(results):
    expected = np.concatenate([of_rank(rank, LARGE) for rank in range(len(results))])
    for of_one in results:
        np.testing.assert_array_equal(of_one["all_gather"], expected)


def test_broadcast_gives_all_the_roots_values(results):
    for of_one in results:
        np.testing.assert_array_equal(
            of_one["broadcast"], of_rank(len(results) - 1, LARGE)
        )


def test_all_to_all_exchanges_parts(results):
    ranks = len(results)
    sent = np.stack(
        [of_rank(rank, LARGE * ranks).reshape(ranks, LARGE) for rank in range(ranks)]
    )
    for rank, of_one in enumerate(results):
        np.testing.assert_array_equal(of_one["all_to_all"], sent[:, rank].reshape(-1))


def test_scatter_gives_each_rank_one_tensor(results):
    for rank, of_one in enumerate(results):
        np.testing.assert_array_equal(of_one["scatter"], of_rank(rank, 1000))


@pytest.mark.parametrize("count", [5, LARGE])
def test_send_and_receive_in_both_directions(results, count):
    ranks = len(results)
    for rank, of_one in enumerate(results):
        from_below = of_rank((rank - 1) % ranks, count)
        from_above = of_rank((rank + 1) % ranks, count)
        np.testing.assert_array_equal(of_one[f"up {count}"], from_below)
        np.testing.assert_array_equal(of_one[f"down {count}"], from_above)


def test_a_batch_may_send_before_it_receives(results):
    ranks = len(results)
    for rank, of_one in enumerate(results):
        np.testing.assert_array_equal(
            of_one["batch"], of_rank((rank - 1) % ranks, LARGE)
        )


def test_nobody_leaves_a_barrier_before_all_have_entered(results):
    last_in = max(float(of_one["entered"]) for of_one in results)
    assert all(float(of_one["left"]) >= last_in for of_one in results)


def test_a_communicator_leaves_no_name_in_shared_memory(results):
    assert all(of_one["segments"].size == 0 for of_one in results)


def test_a_peer_that_ended_is_an_error_at_once(results):
    for of_one in results[:-1]:
        assert "HcclAllreduce, error code is 21" in str(of_one["lost message"])
    # Rank 0 comes later than the others, from the test before, and finds it gone.
    assert results[0]["lost seconds"] < 5


def test_a_peer_that_does_not_come_is_an_error_after_hccls_timeout(results):
    assert "HcclAllreduce, error code is 9" in str(results[0]["missed message"])
    assert TIMEOUT_SECONDS <= results[0]["missed seconds"] < TIMEOUT_SECONDS + 1
