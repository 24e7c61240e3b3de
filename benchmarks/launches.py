"""Kernels that a decoder layer launches in one decode step on vllm-ascend.

Counted in the launch log of the emulated NPU, as the difference between a model of four
layers and one of two: OpenELM against vllm-ascend's own Qwen3, which has the same
architecture, at the same shape; and Llama 3.1 with this package against without it.

    python3 environments/run.py ascend python benchmarks/launches.py [--json]
"""

import json
import os
from collections import Counter
from importlib.metadata import entry_points
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_ascend_models.ops.report import report

OURS = "ascend_models"
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LLAMA = SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
OPENELM = {
    "architectures": ["OpenELMForCausalLM"],
    "model_type": "openelm",
    "model_dim": 256,
    "head_dim": 64,
    "num_gqa_groups": 4,
    "qkv_multipliers": 2.0,
    "ffn_multipliers": 2.0,
    "normalize_qk_projections": True,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}
# What is compared: our side, then the other.
PAIRS: dict[str, list[tuple[str, dict[str, Any], bool]]] = {
    "OpenELM over Qwen3": [("OpenELM", OPENELM, True), ("Qwen3", QWEN, True)],
    "Llama 3.1 with the package over without it": [
        ("with", LLAMA, True),
        ("without", LLAMA, False),
    ],
}


def kernels(config: dict[str, Any], layers: int, with_package: bool) -> Counter[str]:
    """Kernels of one decode step of a model with that many layers."""
    env = {}
    if not with_package:
        plugins = {
            plugin.name
            for group in ("vllm.platform_plugins", "vllm.general_plugins")
            for plugin in entry_points(group=group)
        }
        env["VLLM_PLUGINS"] = ",".join(sorted(plugins - {OURS}))
    depth = {"num_hidden_layers": layers, "num_transformer_layers": layers}
    counts: Counter[str] = Counter()
    with patch.dict(os.environ, env):
        for row in report(config | depth):
            counts.update({name: n * row.count for name, n in row.decode.items()})
    return counts


def per_layer(config: dict[str, Any], with_package: bool) -> Counter[str]:
    """Kernels of one decoder layer."""
    two, four = (kernels(config, layers, with_package) for layers in (2, 4))
    return Counter({name: (four[name] - two[name]) // 2 for name in four})


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the kernels of a layer; exit 1 where ours launches more."""
    results = {}
    sides = [(pair, side) for pair, both in PAIRS.items() for side in both]
    for pair, (name, config, package) in track(
        sides, "Engines", console=Console(stderr=True)
    ):
        results.setdefault(pair, {})[name] = per_layer(config, package)
    totals = {
        pair: {name: counts.total() for name, counts in sides.items()}
        for pair, sides in results.items()
    }
    if as_json:
        print(json.dumps({"kernels": results, "totals": totals}, indent=2))
    else:
        for pair, counted in results.items():
            show(pair, counted)
    over = [ours > theirs for ours, theirs in (t.values() for t in totals.values())]
    raise typer.Exit(int(any(over)))


def show(pair: str, counted: dict[str, Counter[str]]) -> None:
    """Print one comparison, kernel by kernel."""
    table = Table(
        title=f"{pair}: kernels of a layer in a decode step", show_footer=True
    )
    table.add_column("kernel", "all")
    for name, counts in counted.items():
        table.add_column(name, str(counts.total()), justify="right")
    for kernel in sorted(set().union(*counted.values())):
        row = [counts[kernel] for counts in counted.values()]
        if any(row):
            table.add_row(kernel, *map(str, row))
    Console(width=80).print(table)


if __name__ == "__main__":
    typer.run(main)
