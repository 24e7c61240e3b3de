"""Faults to run the vLLM model with, to see that our comparison catches them.

Each is a mistake that somebody writing this model could make. They replace what a
module computes, and not its weights, which the engine may have packed away.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

Forward = Callable[..., Any]
# What a mutant does to one decoder layer: the module to change, and its new forward
# made from the old one.
Replacements = list[tuple[nn.Module, Callable[[Forward], Forward]]]


def _on_every_layer(replace: Callable[[nn.Module], Replacements]):
    """A mutant that replaces the forward of some modules of each decoder layer."""

    @contextmanager
    def mutated(model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            done: set[nn.Module] = set()  # layers share one rotary embedding
            for layer in model.transformer.layers:
                for module, change in replace(layer):
                    if module not in done:
                        done.add(module)
                        forward = change(module.forward)
                        stack.enter_context(patch.object(module, "forward", forward))
            yield

    return mutated


def _on_output(change: Callable[[torch.Tensor], torch.Tensor]):
    """Change the first of the outputs of a vLLM linear layer."""

    def wrap(forward: Forward) -> Forward:
        def changed(*args: Any, **kwargs: Any) -> Any:
            output, bias = forward(*args, **kwargs)
            return change(output), bias

        return changed

    return wrap


def _on_heads(change: Callable[..., list[torch.Tensor]]):
    """Change q, k and v as they leave ``qkv_proj``, as ``[T, heads, head_dim]``."""

    def replace(layer: nn.Module) -> Replacements:
        attn = layer.attn

        def regroup(qkv: torch.Tensor) -> torch.Tensor:
            heads = qkv.view(len(qkv), -1, attn.head_dim)
            counts = [attn.num_heads, attn.num_kv_heads, attn.num_kv_heads]
            changed = change(*heads.split(counts, dim=1))
            return torch.cat(changed, dim=1).reshape(qkv.shape)

        return [(attn.qkv_proj, _on_output(regroup))]

    return _on_every_layer(replace)


def _swap_k_and_v(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    return [q, v, k]


def _reverse_heads_within_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    return [q.unflatten(1, (k.shape[1], -1)).flip(2).flatten(1, 2), k, v]


def _deal_heads_out_to_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Query head h reads KV head ``h % kv_heads`` rather than ``h // group``."""
    return [q.unflatten(1, (-1, k.shape[1])).transpose(1, 2).flatten(1, 2), k, v]


def _swap_gate_and_up(layer: nn.Module) -> Replacements:
    def swap(gate_up: torch.Tensor) -> torch.Tensor:
        return torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1)

    return [(layer.ffn.proj_1, _on_output(swap))]


def _drop_q_norm(layer: nn.Module) -> Replacements:
    return [(layer.attn.q_norm, lambda _: lambda x: x)]


def _drop_k_norm(layer: nn.Module) -> Replacements:
    return [(layer.attn.k_norm, lambda _: lambda x: x)]


def _swap_layer_norms(layer: nn.Module) -> Replacements:
    attn, ffn = layer.attn_norm.forward, layer.ffn_norm.forward
    return [(layer.attn_norm, lambda _: ffn), (layer.ffn_norm, lambda _: attn)]


def _drop_rope(layer: nn.Module) -> Replacements:
    return [(layer.attn.rotary_emb, lambda _: lambda positions, q, k: (q, k))]


def _double_positions(layer: nn.Module) -> Replacements:
    def change(forward: Forward) -> Forward:
        return lambda positions, q, k: forward(positions * 2, q, k)

    return [(layer.attn.rotary_emb, change)]


def _delay_k_by_one(layer: nn.Module) -> Replacements:
    """Off by one where it shows: RoPE is relative, both together would cancel."""

    def change(forward: Forward) -> Forward:
        def changed(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
            rotated_q, _ = forward(positions, q.clone(), k.clone())
            _, rotated_k = forward(positions + 1, q.clone(), k.clone())
            return rotated_q, rotated_k

        return changed

    return [(layer.attn.rotary_emb, change)]


def _rotate_neighbours(layer: nn.Module) -> Replacements:
    """GPT-J's pairing of channels 2i, 2i + 1, rather than i, i + head_dim / 2."""
    head_dim = layer.attn.head_dim
    order = torch.arange(head_dim).view(-1, 2).T.flatten()

    def reorder(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, head_dim)[..., by].reshape(x.shape)

    def change(forward: Forward) -> Forward:
        def changed(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
            q, k = forward(positions, reorder(q, order), reorder(k, order))
            return reorder(q, order.argsort()), reorder(k, order.argsort())

        return changed

    return [(layer.attn.rotary_emb, change)]


def _with_mask(diagonal: int):
    """Attention by hand over one prompt, masked from ``diagonal`` on (1: causal)."""

    def replace(layer: nn.Module) -> Replacements:
        attn = layer.attn

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                x.view(len(x), -1, attn.head_dim).transpose(0, 1) for x in (q, k, v)
            )
            group = attn.num_heads // attn.num_kv_heads
            k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
            scores = q @ k.transpose(1, 2) * attn.head_dim**-0.5
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(diagonal)
            # Not minus infinity: the first row may hide everything.
            weights = scores.masked_fill(hidden, -1e9).softmax(-1)
            return (weights @ v).transpose(0, 1).flatten(1)

        return [(attn.attn, lambda _: attend)]

    return _on_every_layer(replace)


@contextmanager
def _swap_attention_of_two_layers(model: nn.Module) -> Iterator[None]:
    """Layers 1 and 2 of `TINY` have equal heads: only values tell them apart."""
    first, second = (model.transformer.layers[i].attn for i in (1, 2))
    swapped = {"qkv_proj": second.qkv_proj}, {"qkv_proj": first.qkv_proj}
    with (
        patch.dict(first._modules, swapped[0]),
        patch.dict(second._modules, swapped[1]),
    ):
        yield


@contextmanager
def _drop_final_norm(model: nn.Module) -> Iterator[None]:
    def add(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + residual, None

    with patch.object(model.transformer.norm, "forward", add):
        yield


@contextmanager
def _coarser_eps(model: nn.Module) -> Iterator[None]:
    """1e-5, Llama's, in every norm; OpenELM's is 1e-6."""
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                stack.enter_context(patch.object(module, "variance_epsilon", 1e-5))
        yield


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    yield


# Faults of the attention, of the FFN, and of what joins them, under the name of the
# stage that must be blamed.
ATTENTION_MUTANTS = {
    "no RoPE": _on_every_layer(_drop_rope),
    "RoPE at twice the position": _on_every_layer(_double_positions),
    "RoPE of k one position late": _on_every_layer(_delay_k_by_one),
    "RoPE on neighbouring channels": _on_every_layer(_rotate_neighbours),
    "k and v swapped": _on_heads(_swap_k_and_v),
    "heads reversed within a group": _on_heads(_reverse_heads_within_group),
    "heads dealt out to groups": _on_heads(_deal_heads_out_to_groups),
    "q norm dropped": _on_every_layer(_drop_q_norm),
    "k norm dropped": _on_every_layer(_drop_k_norm),
    "mask shows one token of the future": _with_mask(2),
    "mask hides the token itself": _with_mask(0),
    "two layers' projections swapped": _swap_attention_of_two_layers,
}
FFN_MUTANTS = {"gate and up swapped": _on_every_layer(_swap_gate_and_up)}
LAYER_MUTANTS = {
    "eps of the norms 1e-5": _coarser_eps,
    "attention norm and FFN norm swapped": _on_every_layer(_swap_layer_norms),
}
MODEL_MUTANTS = {"final norm dropped": _drop_final_norm}
# No faults, done by the same means: they must pass, or the means is what is caught.
CONTROLS = {
    "attention by hand": _with_mask(1),
    "heads taken apart and joined": _on_heads(lambda q, k, v: [q, k, v]),
}

MUTANTS: dict[str | None, Callable[[nn.Module], Any]] = {
    None: _unchanged,
    **ATTENTION_MUTANTS,
    **FFN_MUTANTS,
    **LAYER_MUTANTS,
    **MODEL_MUTANTS,
    **CONTROLS,
}
