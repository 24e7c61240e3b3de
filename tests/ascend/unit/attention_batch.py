"""Batches of sequences for attention operators, with the right result in fp64."""

import random
from dataclasses import dataclass, field

import torch

CAUSAL_MASK = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), diagonal=1)


@dataclass
class Batch:
    """Sequences of (query tokens, keys), and the operator's arguments for them."""

    lengths: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    sparse_mode: int = 3
    block_size: int = 0  # 0: keys are not paged
    queries: list[torch.Tensor] = field(init=False)
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False)
    arguments: dict = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(count: int, heads: int) -> torch.Tensor:
            shape = (count, heads, self.head_size)
            return torch.randn(shape, generator=generator).to(self.dtype)

        self.queries = [normal(q, self.heads) for q, _ in self.lengths]
        self.keys = [normal(kv, self.kv_heads) for _, kv in self.lengths]
        self.values = [normal(kv, self.kv_heads) for _, kv in self.lengths]
        ends = torch.tensor(self.lengths).cumsum(0)
        self.arguments = {
            "num_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "scale": self.head_size**-0.5,
            "input_layout": "TND",
            "sparse_mode": self.sparse_mode,
            "atten_mask": CAUSAL_MASK if self.sparse_mode else None,
            "actual_seq_lengths": ends[:, 0].tolist(),
            "actual_seq_lengths_kv": ends[:, 1].tolist(),
        }
        key, value = torch.cat(self.keys), torch.cat(self.values)
        if self.block_size:
            key, value = self._page()
        self.tensors = torch.cat(self.queries), key, value

    def _page(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Caches full of NaN, in which each sequence has blocks in no order."""
        blocks = [-(-kv // self.block_size) for _, kv in self.lengths]
        order = list(range(sum(blocks) + 3))
        random.Random(0).shuffle(order)
        table = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
        shape = (len(order), self.block_size, self.kv_heads, self.head_size)
        caches = [torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2)]
        for row, count in enumerate(blocks):
            table[row, :count] = torch.tensor(order[:count])
            del order[:count]
            for cache, tokens in zip(caches, (self.keys, self.values), strict=True):
                for i in range(0, len(tokens[row]), self.block_size):
                    part = tokens[row][i : i + self.block_size]
                    cache[table[row, i // self.block_size], : len(part)] = part
        self.arguments |= {
            "block_table": table,
            "block_size": self.block_size,
            "actual_seq_lengths_kv": [kv for _, kv in self.lengths],
        }
        return caches[0].flatten(2), caches[1].flatten(2)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Result and logarithm of sums, in fp64, with none of the kernel's code."""
        results, sums = [], []
        for query, key, value in zip(self.queries, self.keys, self.values, strict=True):
            group = self.heads // self.kv_heads
            key = key.double().repeat_interleave(group, 1)
            value = value.double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", query.double(), key)
            scores *= self.head_size**-0.5
            row, column = torch.meshgrid(
                torch.arange(len(query)), torch.arange(len(key)), indexing="ij"
            )
            if self.sparse_mode == 2:
                scores[:, column > row] = -torch.inf
            if self.sparse_mode == 3:
                scores[:, column - len(key) > row - len(query)] = -torch.inf
            # A row without keys: zeros, and no logarithm.
            weights = scores.softmax(-1).nan_to_num(0)
            results.append(torch.einsum("hqk,khd->qhd", weights, value))
            sums.append(scores.logsumexp(-1).t())
        lse = torch.cat(sums)
        return torch.cat(results), lse.masked_fill(lse == -torch.inf, torch.inf)


def assert_rounded_once(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Half a unit in the last place of the type, and fp32's noise of a few hundred."""
    rtol = torch.finfo(found.dtype).eps / 2
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=2e-6)
