"""The one Triton kernel on the path of vllm-ascend's model runner.

On an NPU triton-ascend compiles it; here the same function is done on host memory.
"""

from collections.abc import Callable

import torch

from ascend.emulator.launch_log import record


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    pad_id: int,
) -> None:
    """Where in the KV cache each token's key and value go; all tensors on the host.

    Source: ``_compute_slot_mapping_kernel`` of vllm/v1/worker/block_table.py, without
    context parallelism.

    Args:
        num_tokens: from this token on, slots are padding.
        max_num_tokens: up to this token.
        query_start_loc: ``[num_reqs + 1]``, first token of each request.
        positions: ``[num_tokens]``, of each token in its sequence.
        block_table: ``[num_reqs, blocks]``, numbers of each request's blocks.
        block_size: tokens of a block.
        slot_mapping: ``[max_num_tokens]``, written.
        pad_id: slot of tokens that are padding.
    """
    lengths = query_start_loc.diff().long()
    requests = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = positions[: len(requests)].long()
    blocks = block_table[requests, position // block_size].long()
    slots = blocks * block_size + position % block_size
    slot_mapping[: len(requests)] = slots.to(slot_mapping.dtype)
    slot_mapping[num_tokens:max_num_tokens] = pad_id


class _TritonKernel:
    """``kernel[grid](…)``, as Triton's are launched, on tensors of the device."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        num_requests = grid[0] - 1  # the last program writes the padding

        def launch(
            num_tokens: int,
            max_num_tokens: int,
            query_start_loc: torch.Tensor,
            positions: torch.Tensor,
            block_table: torch.Tensor,
            block_table_stride: int,
            block_size: int,
            slot_mapping: torch.Tensor,
            **constants: int,
        ) -> None:
            from ascend.emulator.device import alias_on_host

            if constants["TOTAL_CP_WORLD_SIZE"] != 1:
                raise NotImplementedError("the emulator has no context parallelism")
            record("triton::compute_slot_mapping", (positions, block_table))
            compute_slot_mapping(
                num_tokens,
                max_num_tokens,
                alias_on_host(query_start_loc)[: num_requests + 1],
                alias_on_host(positions),
                alias_on_host(block_table),
                block_size,
                alias_on_host(slot_mapping),
                constants["PAD_ID"],
            )

        return launch


compute_slot_mapping_kernel = _TritonKernel()
