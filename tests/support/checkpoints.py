"""Random OpenELM checkpoints in Apple's layout, and the configurations tests use.

Geometry is written out here rather than taken from the package, so that a wrong rule
in the package meets a checkpoint that does not fit it.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from support.reference import Config, Tensors


def openelm_config(
    *,
    model_dim: int,
    head_dim: int,
    num_query_heads: list[int],
    num_kv_heads: list[int],
    ffn_multipliers: list[float],
    **overrides: Any,
) -> Config:
    """config.json as Apple writes it, with a small vocabulary and given layers."""
    return {
        "architectures": ["OpenELMForCausalLM"],
        "model_type": "openelm",
        "model_dim": model_dim,
        "num_transformer_layers": len(num_query_heads),
        "head_dim": head_dim,
        "num_query_heads": num_query_heads,
        "num_kv_heads": num_kv_heads,
        "num_gqa_groups": 4,
        "qkv_multipliers": [0.5, 1.0],
        "ffn_multipliers": ffn_multipliers,
        "ffn_dim_divisor": 256,
        "ffn_with_glu": True,
        "activation_fn_name": "swish",
        "normalization_layer_name": "rms_norm",
        "normalize_qk_projections": True,
        "share_input_output_layers": True,
        "rope_freq_constant": 10000,
        "rope_max_length": 4096,
        "max_context_length": 2048,
        "vocab_size": 512,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **overrides,
    }


# Four layers that differ in everything that a layer can differ in. The third FFN
# multiplier is one that plain rounding gets wrong: 2.97 · 128 is 512 wide, not 256.
TINY = openelm_config(
    model_dim=128,
    head_dim=32,
    num_query_heads=[4, 8, 8, 12],
    num_kv_heads=[1, 2, 2, 3],
    ffn_multipliers=[0.5, 1.0, 2.97, 4.0],
)
TINY_PLAIN_QK_UNTIED = TINY | {
    "normalize_qk_projections": False,
    "share_input_output_layers": False,
}


class _Published(NamedTuple):
    model_dim: int
    head_dim: int
    num_layers: int
    runs: list[tuple[int, int]]  # (query heads, layers in a row), bottom to top


_PUBLISHED = {
    "270M": _Published(1280, 64, 16, [(12, 5), (16, 7), (20, 4)]),
    "450M": _Published(1536, 64, 20, [(12, 3), (16, 7), (20, 6), (24, 4)]),
    "1_1B": _Published(2048, 64, 28, [(16, 3), (20, 7), (24, 8), (28, 6), (32, 4)]),
    "3B": _Published(3072, 128, 36, [(12, 4), (16, 14), (20, 12), (24, 6)]),
}


def true_geometry(size: str, num_layers: int, **overrides: Any) -> Config:
    """A published model with only some of its layers, evenly from first to last.

    Args:
        size: 270M, 450M, 1_1B or 3B.
        num_layers: layers to keep, at least 2; the first and the last are among them.
        **overrides: further keys of config.json.
    """
    published = _PUBLISHED[size]
    last = published.num_layers - 1
    kept = [round(i * last / (num_layers - 1)) for i in range(num_layers)]
    heads = [q for q, layers in published.runs for _ in range(layers)]
    multipliers = [round(0.5 + 3.5 * i / last, 2) for i in range(last + 1)]
    return openelm_config(
        model_dim=published.model_dim,
        head_dim=published.head_dim,
        num_query_heads=[heads[i] for i in kept],
        num_kv_heads=[heads[i] // 4 for i in kept],
        ffn_multipliers=[multipliers[i] for i in kept],
        **overrides,
    )


def ffn_width(multiplier: float, model_dim: int, divisor: int) -> int:
    """Width of an FFN: the nearest multiple, one more if that is over 10 % less."""
    wanted = multiplier * model_dim
    nearest = max(1, int(wanted / divisor + 0.5)) * divisor
    return nearest if nearest >= 0.9 * wanted else nearest + divisor


def random_tensors(config: Config, seed: int = 0) -> Tensors:
    """Random fp32 weights that make every part of the model count.

    Attention scores have a standard deviation near 2, so that attention picks, and it
    adds as much to the residual as the FFN does. A wrong rotation, head or gate then
    moves logits by far more than rounding. The embedding is as large as what layers
    add (the eps of a norm shows on a small one); the last norm brings the logits of a
    tied head back to about 10 at most.
    """
    generator = torch.Generator().manual_seed(seed)

    def projection(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        weight = torch.randn(rows, columns, generator=generator)
        return weight.mul_(gain * columns**-0.5)

    def norm(size: int, mean: float = 1.0) -> torch.Tensor:
        return mean + 0.2 * torch.randn(size, generator=generator)

    dim, head_dim, vocab = config["model_dim"], config["head_dim"], config["vocab_size"]
    qk_normed = config["normalize_qk_projections"]
    tensors = {"transformer.token_embeddings.weight": projection(vocab, dim, dim**0.5)}
    for i, multiplier in enumerate(config["ffn_multipliers"]):
        heads, kv_heads = config["num_query_heads"][i], config["num_kv_heads"][i]
        width = ffn_width(multiplier, dim, config["ffn_dim_divisor"])
        layer = {
            "attn_norm": norm(dim),
            "attn.qkv_proj": projection(
                (heads + 2 * kv_heads) * head_dim, dim, 1.0 if qk_normed else 1.4
            ),
            "attn.out_proj": projection(dim, heads * head_dim, 2.5),
            "ffn_norm": norm(dim),
            "ffn.proj_1": projection(2 * width, dim),
            "ffn.proj_2": projection(dim, width, 1.5),
        }
        if qk_normed:
            layer |= {"attn.q_norm": norm(head_dim, 1.4)}
            layer |= {"attn.k_norm": norm(head_dim, 1.4)}
        for name, tensor in layer.items():
            tensors[f"transformer.layers.{i}.{name}.weight"] = tensor
    tensors["transformer.norm.weight"] = norm(dim) * (1.5 * dim**-0.5)
    if not config["share_input_output_layers"]:
        tensors["lm_head.weight"] = projection(vocab, dim, dim**0.5)
    return tensors


def save_openelm_checkpoint(path: Path, config: Config, tensors: Tensors) -> None:
    """Write config.json and model.safetensors, as Apple does: no tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def write_openelm_checkpoint(
    path: Path, config: Config, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensors:
    """Write a random checkpoint; returns what it holds, as fp32.

    Args:
        path: directory, made if it is not there.
        config: keys of config.json, `TINY` or `true_geometry(...)` for example.
        seed: of the weights.
        dtype: in which the file keeps them; what is returned is rounded to it.
    """
    stored = {
        name: tensor.to(dtype) for name, tensor in random_tensors(config, seed).items()
    }
    name = str(dtype).removeprefix("torch.")
    save_openelm_checkpoint(path, config | {"torch_dtype": name}, stored)
    return {name: tensor.float() for name, tensor in stored.items()}


def random_prompt(config: Config, length: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt, BOS first as Apple's models expect."""
    generator = torch.Generator().manual_seed(1_000 * seed + length)
    ids = torch.randint(3, config["vocab_size"], (length,), generator=generator)
    return [config["bos_token_id"], *ids.tolist()[1:]]
