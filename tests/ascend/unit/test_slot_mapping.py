"""Slots of the KV cache, against a loop over tokens."""

import pytest
import torch

from ascend.emulator.slot_mapping import compute_slot_mapping

PAD = -1
BLOCK_TABLE = torch.tensor([[7, 2, 0], [5, 9, 1]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("lengths", "computed"),
    [((3, 4), (0, 0)), ((1, 1), (6, 11)), ((1, 7), (9, 2)), ((5,), (4,))],
    ids=["prefill", "decode", "mixed, across blocks", "one request"],
)
def test_each_token_has_the_slot_of_its_position(lengths, computed):
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    positions = torch.cat(
        [torch.arange(c, c + n) for n, c in zip(lengths, computed, strict=True)]
    )
    slots = torch.full((16,), 99, dtype=torch.int32)
    compute_slot_mapping(
        *(len(positions), 12, starts, positions, BLOCK_TABLE, 4, slots, PAD)
    )
    expected = []
    for request, (length, first) in enumerate(zip(lengths, computed, strict=True)):
        for position in range(first, first + length):
            block = int(BLOCK_TABLE[request, position // 4])
            expected.append(block * 4 + position % 4)
    padding = [PAD] * (12 - len(expected))
    assert slots.tolist() == expected + padding + [99] * 4  # nothing beyond
