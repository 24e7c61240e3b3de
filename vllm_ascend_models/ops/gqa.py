"""Grouped-query attention under tensor parallelism, for any number of KV heads.

vLLM's layers give every rank the same number of whole heads. `plan_heads` puts the
real heads of a layer into that many slots of each rank and leaves the rest empty.
An empty slot is zero rows of q, k and v and zero columns of the output projection, so
it adds exactly nothing to the sum over ranks, and ``QKVParallelLinear`` and
``RowParallelLinear`` serve the layer as they are, with the slots for its heads.

Three KV heads A, B, C with two query heads each, at TP 2 and at TP 8::

    TP 2      rank 0     rank 1         TP 8   rank 0  1   2   3   4   5   6   7
    kv       [A ][B ]   [C ][- ]        kv        [A] [A] [B] [B] [C] [C] [-] [-]
    query    [aa][bb]   [cc][--]        query     [a] [a] [b] [b] [c] [c] [-] [-]

Up to as many ranks as KV heads, a rank holds ``ceil(kv / TP)`` of them with their whole
groups: no plan needs less KV cache on its fullest rank. Beyond, it holds one, which
neighbouring ranks repeat while they share out its query heads.
"""

from dataclasses import dataclass

import torch

Slots = tuple[int | None, ...]


@dataclass(frozen=True)
class HeadPlan:
    """Which head of a layer sits in which slot.

    Attributes:
        tp_size: tensor-parallel ranks.
        query_slots: the query head in each slot, None for an empty one; first all
            slots of rank 0, then those of rank 1, and so on.
        kv_slots: the KV head in each slot, in the same order. Within a rank, the first
            of its KV slots belongs to its first query slots, in equal groups.
    """

    tp_size: int
    query_slots: Slots
    kv_slots: Slots

    @property
    def num_heads(self) -> int:
        """Query slots of one rank."""
        return len(self.query_slots) // self.tp_size

    @property
    def num_kv_heads(self) -> int:
        """KV slots of one rank."""
        return len(self.kv_slots) // self.tp_size

    @property
    def is_identity(self) -> bool:
        """Whether every head is where an even split would put it."""
        return all(
            slots == tuple(range(len(slots)))
            for slots in (self.query_slots, self.kv_slots)
        )

    def lay_out_qkv(self, weight: torch.Tensor) -> torch.Tensor:
        """Rows of ``q | k | v``, ``[(q + 2 kv) * head_dim, in]``, into slots."""
        query, kv = _num_heads(self.query_slots), _num_heads(self.kv_slots)
        heads = weight.unflatten(0, (query + 2 * kv, -1))
        q, k, v = heads.split([query, kv, kv])
        parts = (q, self.query_slots), (k, self.kv_slots), (v, self.kv_slots)
        return torch.cat([_lay_out(part, slots) for part, slots in parts]).flatten(0, 1)

    def lay_out_output(self, weight: torch.Tensor) -> torch.Tensor:
        """Columns of the output projection, ``[out, q * head_dim]``, into slots."""
        heads = weight.T.unflatten(0, (_num_heads(self.query_slots), -1))
        return _lay_out(heads, self.query_slots).flatten(0, 1).T


def _num_heads(slots: Slots) -> int:
    return 1 + max(head for head in slots if head is not None)


def _lay_out(heads: torch.Tensor, slots: Slots) -> torch.Tensor:
    laid_out = heads.new_zeros(len(slots), *heads.shape[1:])
    for slot, head in enumerate(slots):
        if head is not None:
            laid_out[slot] = heads[head]
    return laid_out


def plan_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> HeadPlan:
    """Plan one layer; at TP 1, and wherever the heads divide, the plan is the identity.

    Args:
        num_heads: query heads of the layer, a multiple of its KV heads.
        num_kv_heads: KV heads of the layer.
        tp_size: tensor-parallel ranks.
    """
    group = num_heads // num_kv_heads
    repeats = max(1, tp_size // num_kv_heads)  # ranks that hold the same KV head
    kv_per_rank = -(-num_kv_heads // tp_size)
    share = -(-group // repeats)  # of a group's query heads, on one rank
    kv_slots: list[int | None] = []
    query_slots: list[int | None] = []
    for slot in range(tp_size * kv_per_rank):
        head, turn = divmod(slot, repeats)
        kv_slots.append(head if head < num_kv_heads else None)
        for member in range(turn * share, (turn + 1) * share):
            real = head < num_kv_heads and member < group
            query_slots.append(head * group + member if real else None)
    return HeadPlan(tp_size, tuple(query_slots), tuple(kv_slots))
