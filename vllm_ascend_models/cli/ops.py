"""`ops`: what each layer of a model launches, and whether NPUs have it."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_ascend_models.cli.console import (
    CommandFailure,
    fail,
    print_json,
    stderr_console,
)
from vllm_ascend_models.ops.report import ReportFailure, Row, report


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="Directory or repository; only its config.json is read.",
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.")
    ] = False,
) -> None:
    """Show the kernels that each layer of a model launches on this platform.

    Builds every distinct layer once, with dummy weights, and runs a prefill and a
    decode step. Where there is no NPU it says what one would launch, marked `read`.
    Exits 1 if a layer has no place on an NPU.

    Example: vllm-ascend-models ops apple/OpenELM-3B-Instruct
    """
    try:
        config = _distinct_layers(_read_config(model))
        with stderr_console().status("building the layers and running them"):
            rows = report(config)
    except (CommandFailure, ReportFailure) as failure:
        fail(failure)
    if as_json:
        print_json({"model": model, "rows": [asdict(row) for row in rows]})
    elif as_markdown:
        typer.echo(markdown(rows))
    else:
        _show(model, rows)
    raise typer.Exit(int(any(row.problem for row in rows)))


def _read_config(model: str) -> dict[str, Any]:
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(model)
    except (OSError, ValueError) as error:
        raise CommandFailure(f"{model} has no config.json to read: {error}") from error
    if not config:
        raise CommandFailure(f"{model} has no config.json.")
    return config


def _distinct_layers(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with every distinct layer once."""
    if config.get("model_type") != "openelm":
        return config | {"num_hidden_layers": 1}
    from vllm_ascend_models.openelm.config import OpenELMConfig
    from vllm_ascend_models.openelm.geometry import spread_multipliers

    try:
        whole = OpenELMConfig(**config)
    except ValueError as error:
        raise CommandFailure(str(error)) from error
    layers = whole.layer_geometry()
    kept = [layers.index(layer) for layer in dict.fromkeys(layers)]
    multipliers = spread_multipliers(whole.ffn_multipliers, len(layers))
    return config | {
        "num_transformer_layers": len(kept),
        "num_query_heads": [layers[i].num_query_heads for i in kept],
        "num_kv_heads": [layers[i].num_kv_heads for i in kept],
        "ffn_multipliers": [multipliers[i] for i in kept],
        "qkv_multipliers": 1.0,
    }


def markdown(rows: list[Row]) -> str:
    """The table for a document."""
    lines = [
        "| layer | class | kernels of a decode step | level |",
        "|---|---|---|---|",
    ]
    for row in rows:
        kernels = ", ".join(f"`{kernel}`" for kernel in _kernels(row))
        name = f"{_name(row)} ×{row.count}"
        fit = row.problem or row.level
        lines.append(f"| {name} | {_classes(row, ' → ')} | {kernels} | {fit} |")
    return "\n".join(lines)


def _show(model: str, rows: list[Row]) -> None:
    table = Table(title=f"{model}: what its layers launch", show_lines=True)
    table.add_column("layers, classes")
    table.add_column("kernels of a decode step", no_wrap=True)
    table.add_column("level")
    for row in rows:
        table.add_row(
            f"[bold]{_name(row)}[/bold] ×{row.count}\n{_classes(row, chr(10))}",
            "\n".join(_kernels(row)),
            f"[red]{row.problem}[/red]" if row.problem else f"{row.level} ✓",
        )
    Console(width=80).print(table)


def _name(row: Row) -> str:
    """The layer's name within a decoder layer, or in the model."""
    return row.component.rpartition(".*.")[2]


def _classes(row: Row, separator: str) -> str:
    """The class of vLLM and, where there is another in its place, that one."""
    used = row.used_class.rpartition(".")[2]
    return separator.join(dict.fromkeys([row.vllm_class, used]))


def _kernels(row: Row) -> list[str]:
    """Names and counts; names alone where they are read from sources."""
    if row.level == "read":
        return [name.partition("::")[2] for name in row.npu_kernels]
    lines = []
    for name in row.decode | row.prefill:
        decode, prefill = row.decode.get(name, 0), row.prefill.get(name, 0)
        line = f"{decode} {name.partition('::')[2]}"
        lines.append(line if prefill == decode else f"{line}, {prefill} in a prefill")
    return lines
