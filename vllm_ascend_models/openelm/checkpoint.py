"""Strict weights: a checkpoint has the tensors its configuration gives, and no other.

The same table of names and shapes is checked twice: against the file headers,
before anything loads and in the process that the user sees, and against each
tensor as it loads, which is where its values are seen.
"""

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from vllm_ascend_models.openelm.config import OpenELMConfig

Shape = tuple[int, ...]

LM_HEAD = "lm_head.weight"
EMBEDDING = "transformer.token_embeddings.weight"


def expected_tensors(config: OpenELMConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of a checkpoint in Apple's layout."""
    dim, head_dim = config.model_dim, config.head_dim
    tensors: dict[str, Shape] = {
        EMBEDDING: (config.vocab_size, dim),
        "transformer.norm.weight": (dim,),
    }
    for index, layer in enumerate(config.layer_geometry()):
        width = layer.intermediate_size
        shapes: dict[str, Shape] = {
            "attn.qkv_proj": (layer.qkv_size, dim),
            "attn.out_proj": (dim, layer.num_query_heads * head_dim),
            "ffn.proj_1": (2 * width, dim),
            "ffn.proj_2": (dim, width),
            "attn_norm": (dim,),
            "ffn_norm": (dim,),
        }
        if config.normalize_qk_projections:
            shapes |= {"attn.q_norm": (head_dim,), "attn.k_norm": (head_dim,)}
        for name, shape in shapes.items():
            tensors[f"transformer.layers.{index}.{name}.weight"] = shape
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = (config.vocab_size, dim)
    return tensors


def check_weights(
    weights: Iterable[tuple[str, torch.Tensor]], config: OpenELMConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on as they load; at the first wrong one, or a missing one, stop.

    Raises:
        ValueError: names the tensor, what was expected and what was found.
    """
    expected = expected_tensors(config)
    seen: set[str] = set()
    for name, tensor in weights:
        _check_tensor(name, tuple(tensor.shape), expected)
        _check_finite(name, tensor)
        seen.add(name)
        yield name, tensor
    _check_complete(seen, expected)


def check_headers(directory: Path, config: OpenELMConfig) -> None:
    """Check names, shapes and completeness of the safetensors files of a directory.

    Reads file headers only. A tied configuration whose files hold a head of their
    own becomes untied: some fine-tunes and quantisers add one.

    Raises:
        ValueError: no safetensors file, one that is cut short or unreadable, or a
            tensor that is missing, unknown or of another shape.
    """
    found = _read_headers(directory)
    if LM_HEAD in found:
        config.tie_word_embeddings = False
    expected = expected_tensors(config)
    for name, shape in found.items():
        _check_tensor(name, shape, expected)
    _check_complete(found, expected)


def _check_tensor(name: str, found: Shape, expected: dict[str, Shape]) -> None:
    if name not in expected:
        raise ValueError(
            f"The checkpoint holds a tensor `{name}` {list(found)} that its "
            f"config.json gives no place to."
        )
    if found != expected[name]:
        raise ValueError(
            f"Tensor `{name}` of the checkpoint has shape {list(found)}, but its "
            f"config.json asks for {list(expected[name])}."
        )


def _check_complete(found: Iterable[str], expected: dict[str, Shape]) -> None:
    if missing := sorted(expected.keys() - set(found)):
        name = missing[0]
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"The checkpoint lacks tensor `{name}` {list(expected[name])}{others}."
        )


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    # NaN and infinity survive a sum, which reads the tensor once and allocates
    # nothing: asked for another dtype than the tensor's, it would convert it first.
    # A sum of finite values can overflow too, so it only raises a doubt.
    if not math.isfinite(tensor.sum()):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise ValueError(
                f"Tensor `{name}` of the checkpoint holds {bad} values that are NaN "
                f"or infinite, of {tensor.numel()}. The file is damaged, or the "
                "training that made it diverged."
            )


def _read_headers(directory: Path) -> dict[str, Shape]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{directory} holds no *.safetensors file. Other weight formats can run "
            "code when they load, so OpenELM takes safetensors only."
        )
    found: dict[str, Shape] = {}
    for file in files:
        for name, info in _read_header(file).items():
            found[name] = tuple(info["shape"])
    return found


def _read_header(file: Path) -> dict[str, Any]:
    from vllm.transformers_utils.utils import parse_safetensors_file_metadata

    try:
        header = parse_safetensors_file_metadata(file)
        with file.open("rb") as stream:
            data_start = 8 + int.from_bytes(stream.read(8), "little")
    except Exception as error:
        raise ValueError(
            f"{file} is not a readable safetensors file ({error}). Copy or download "
            "it again."
        ) from error
    header.pop("__metadata__", None)
    size = os.path.getsize(file)
    for name, info in header.items():
        if (end := data_start + info["data_offsets"][1]) > size:
            raise ValueError(
                f"{file} is cut short inside tensor `{name}`: it has {size} bytes "
                f"and needs at least {end}. Copy or download it again."
            )
    return header
