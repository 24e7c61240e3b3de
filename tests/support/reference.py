"""A plain fp32 OpenELM, for one sequence and without a KV cache, to compare with.

Written from the architecture (corenet's ``general_gpt.py``), not from our vLLM model:
it imports nothing of ours, takes head counts from the lists in config.json and FFN
widths from the tensors, and spells out what a kernel would fuse. Each stage is a
function of its own, so that a test can tell which one differs.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

_EPS = 1e-6  # fixed in Apple's code and absent from its config.json


class LayerStages(NamedTuple):
    """What one layer takes in and what each of its parts gives, all ``[T, dim]``."""

    layer_in: torch.Tensor
    attn_in: torch.Tensor
    attn_out: torch.Tensor
    ffn_in: torch.Tensor
    ffn_out: torch.Tensor
    layer_out: torch.Tensor


def rms_norm(config: Config, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension."""
    eps = config.get("rms_norm_eps", _EPS)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """RoPE in rotate-half style over ``[T, heads, head_dim]``, positions 0 to T-1.

    Channel i of the first half and channel i of the second are one complex number,
    turned by ``position · base^(-2i / head_dim)``. The angles are rounded to fp32, as
    in Apple's code and every engine: exact ones move logits by 9e-5 at position 1000.
    """
    length, _, head_dim = x.shape
    half = head_dim // 2
    frequencies = 1.0 / base ** (torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().to(x)[:, None], angles.sin().to(x)[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(
    config: Config, tensors: Tensors, layer: int, x: torch.Tensor
) -> torch.Tensor:
    """Causal grouped-query attention of one layer, ``[T, dim]`` to ``[T, dim]``."""
    prefix = f"transformer.layers.{layer}.attn"
    heads, kv_heads = config["num_query_heads"][layer], config["num_kv_heads"][layer]
    head_dim, base = config["head_dim"], config["rope_freq_constant"]
    qkv = x @ tensors[f"{prefix}.qkv_proj.weight"].T
    q, k, v = qkv.view(len(x), -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if config["normalize_qk_projections"]:
        q = rms_norm(config, q, tensors[f"{prefix}.q_norm.weight"])
        k = rms_norm(config, k, tensors[f"{prefix}.k_norm.weight"])
    q, k = rotate(q, base), rotate(k, base)

    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    outputs = []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, kv_head].T / head_dim**0.5
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append(weights @ v[:, kv_head])
    return torch.cat(outputs, dim=-1) @ tensors[f"{prefix}.out_proj.weight"].T


def ffn(tensors: Tensors, layer: int, x: torch.Tensor) -> torch.Tensor:
    """``proj_2(silu(gate) · up)`` of one layer, ``[T, dim]`` to ``[T, dim]``."""
    prefix = f"transformer.layers.{layer}.ffn"
    gate, up = (x @ tensors[f"{prefix}.proj_1.weight"].T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ tensors[f"{prefix}.proj_2.weight"].T


def decoder_layer(
    config: Config, tensors: Tensors, layer: int, x: torch.Tensor
) -> LayerStages:
    """One pre-norm layer over ``[T, dim]``, with everything that its parts say."""
    prefix = f"transformer.layers.{layer}"
    attn_in = rms_norm(config, x, tensors[f"{prefix}.attn_norm.weight"])
    attn_out = attention(config, tensors, layer, attn_in)
    middle = x + attn_out
    ffn_in = rms_norm(config, middle, tensors[f"{prefix}.ffn_norm.weight"])
    ffn_out = ffn(tensors, layer, ffn_in)
    return LayerStages(x, attn_in, attn_out, ffn_in, ffn_out, middle + ffn_out)


def layer_stages(
    config: Config, tensors: Tensors, token_ids: list[int]
) -> list[LayerStages]:
    """Run all layers over one sequence; one entry a layer."""
    x = tensors["transformer.token_embeddings.weight"][token_ids]
    stages = []
    for layer in range(config["num_transformer_layers"]):
        stages.append(decoder_layer(config, tensors, layer, x))
        x = stages[-1].layer_out
    return stages


def reference_logits(
    config: Config, tensors: Tensors, token_ids: list[int]
) -> torch.Tensor:
    """Logits at every position of one sequence.

    Args:
        config: the keys of Apple's config.json.
        tensors: the checkpoint under Apple's names, one float dtype throughout.
        token_ids: the sequence, T ids.

    Returns:
        ``[T, vocab_size]``; row t predicts token t + 1.
    """
    x = layer_stages(config, tensors, token_ids)[-1].layer_out
    embedding = tensors["transformer.token_embeddings.weight"]
    head = (
        embedding if config["share_input_output_layers"] else tensors["lm_head.weight"]
    )
    return rms_norm(config, x, tensors["transformer.norm.weight"]) @ head.T
