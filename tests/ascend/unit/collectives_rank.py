"""The program of one rank of test_collectives.py: every operation, and what it gave.

    python collectives_rank.py RANK RANKS DIRECTORY

It meets the other ranks through the directory and leaves its results there, as
``RANK.npz``.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

# Above the pieces in which a collective (512 KiB) and a channel (256 KiB) move bytes,
# and a multiple of neither.
LARGE = 300_001
TYPES = ("bfloat16", "float16", "float32", "int64")
TIMEOUT_SECONDS = 1


def of_rank(rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    """A rank's input: values whose sums every type represents, fp32's excepted."""
    generator = np.random.default_rng(1000 * count + rank)
    if dtype == "float32":
        return generator.standard_normal(count).astype(np.float32)
    if dtype == "int64":  # beyond what a double represents
        return generator.integers(-(2**60), 2**60, count)
    return generator.integers(-64, 64, count).astype(np.float32) / 8


def main(rank: int, ranks: int, directory: Path) -> None:
    """One rank: join the others, run everything, save what it gave."""
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    torch.npu.set_device(rank)
    dist.init_process_group(
        "hccl",
        init_method=f"file://{directory / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
    )
    results = {
        **run_reductions(rank, ranks),
        **run_copies(rank, ranks),
        **run_point_to_point(rank, ranks),
        **run_barrier(rank),
        "segments": np.array(own_segments()),
        **miss_a_peer(rank, ranks),
        **lose_a_peer(rank, ranks),
    }
    np.savez(directory / f"{rank}.npz", **results)
    # As a worker leaves that has lost a peer: no more collectives, no clean-up.
    os._exit(0)


def to_npu(values: np.ndarray, dtype: str = "float32"):
    import torch

    return torch.from_numpy(values).to(getattr(torch, dtype)).npu()


def to_numpy(tensor) -> np.ndarray:
    import torch

    host = tensor.cpu()
    return (host.float() if host.dtype == torch.bfloat16 else host).numpy()


def run_reductions(rank: int, ranks: int) -> dict[str, np.ndarray]:
    import torch
    import torch.distributed as dist

    results = {}
    for dtype in TYPES:
        for name, op in ("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX):
            values = to_npu(of_rank(rank, 1000, dtype), dtype)
            dist.all_reduce(values, op)
            results[f"all_reduce {name} {dtype}"] = to_numpy(values)
    # 13/32 of bfloat16's step at 1: rounded after each addition, nothing of it stays.
    once = to_npu(np.array([1.0 if rank == 0 else 13 / 4096]), "bfloat16")
    dist.all_reduce(once)
    results["rounded once"] = to_numpy(once)

    large = to_npu(of_rank(rank, LARGE))
    dist.all_reduce(large)
    results["all_reduce large"] = to_numpy(large)

    part = torch.empty(LARGE, device="npu")
    dist.reduce_scatter_tensor(part, to_npu(of_rank(rank, LARGE * ranks)))
    results["reduce_scatter"] = to_numpy(part)
    return results


def run_copies(rank: int, ranks: int) -> dict[str, np.ndarray]:
    import torch
    import torch.distributed as dist

    own = to_npu(of_rank(rank, LARGE))
    gathered = torch.empty(LARGE * ranks, device="npu")
    dist.all_gather_into_tensor(gathered, own)
    from_last = to_npu(of_rank(rank, LARGE))
    dist.broadcast(from_last, src=ranks - 1)
    exchanged = torch.empty(LARGE * ranks, device="npu")
    dist.all_to_all_single(exchanged, to_npu(of_rank(rank, LARGE * ranks)))
    scattered = torch.empty(1000, device="npu")
    parts = [to_npu(of_rank(to, 1000)) for to in range(ranks)] if rank == 0 else None
    dist.scatter(scattered, parts, src=0)
    return {
        "all_gather": to_numpy(gathered),
        "broadcast": to_numpy(from_last),
        "all_to_all": to_numpy(exchanged),
        "scatter": to_numpy(scattered),
    }


def run_point_to_point(rank: int, ranks: int) -> dict[str, np.ndarray]:
    """Small and large messages around the ring of ranks, either way."""
    import torch
    import torch.distributed as dist

    results = {}
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for name, target, source in ("up", after, before), ("down", before, after):
        for count in 5, LARGE:
            received = torch.empty(count, device="npu")
            # A send waits for its receiver once the channel is full: one rank begins.
            if rank == 0:
                dist.send(to_npu(of_rank(rank, count)), target)
                dist.recv(received, source)
            else:
                dist.recv(received, source)
                dist.send(to_npu(of_rank(rank, count)), target)
            results[f"{name} {count}"] = to_numpy(received)

    # All send first, which only a batch allows.
    received = torch.empty(LARGE, device="npu")
    operations = [
        dist.P2POp(dist.isend, to_npu(of_rank(rank, LARGE)), after),
        dist.P2POp(dist.irecv, received, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    results["batch"] = to_numpy(received)
    return results


def run_barrier(rank: int) -> dict[str, np.ndarray]:
    import torch.distributed as dist

    if rank == 0:
        time.sleep(0.5)
    entered = time.monotonic()
    dist.barrier()
    return {"entered": np.array(entered), "left": np.array(time.monotonic())}


def own_segments() -> list[str]:
    """Names in /dev/shm of the segments of communicators that this process began."""
    return [
        path.name for path in Path("/dev/shm").glob(f"npu-emulator-{os.getpid()}-*")
    ]


def miss_a_peer(rank: int, ranks: int) -> dict[str, np.ndarray]:
    """In a group of its own, the last rank lives and does not come."""
    import torch.distributed as dist

    pair = dist.new_group([0, ranks - 1])
    if rank not in (0, ranks - 1):
        return {}
    dist.all_reduce(to_npu(of_rank(rank, 10)), group=pair)
    if rank == ranks - 1:
        time.sleep(TIMEOUT_SECONDS + 1)
        return {}
    os.environ["HCCL_EXEC_TIMEOUT"] = str(TIMEOUT_SECONDS)
    results = all_reduce_that_fails("missed", rank, pair)
    del os.environ["HCCL_EXEC_TIMEOUT"]
    return results


def lose_a_peer(rank: int, ranks: int) -> dict[str, np.ndarray]:
    """The last rank ends; the others go on with an operation that it was to be in."""
    if rank == ranks - 1:
        return {}
    return all_reduce_that_fails("lost", rank, None)


def all_reduce_that_fails(case: str, rank: int, group) -> dict[str, np.ndarray]:
    import torch.distributed as dist

    began = time.monotonic()
    try:
        dist.all_reduce(to_npu(of_rank(rank, 10)), group=group)
        message = "no error"
    except RuntimeError as error:
        message = str(error)
    seconds = time.monotonic() - began
    return {f"{case} message": np.array(message), f"{case} seconds": np.array(seconds)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
