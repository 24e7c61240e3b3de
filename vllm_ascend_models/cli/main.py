"""Entry point of the command `vllm-ascend-models`: the list of its subcommands.

A subcommand is a module with a function `command`, and one line here. Modules load
for every `--help`, so torch, transformers and vLLM are imported where they are used.
"""

from typing import Annotated

import typer

from vllm_ascend_models import __version__
from vllm_ascend_models.cli import demo, demo_model, ops

app = typer.Typer(
    help="OpenELM and Llama 3.1 for vLLM, on Ascend NPUs and everywhere else.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("demo")(demo.command)
app.command("demo-model")(demo_model.command)
app.command("ops")(ops.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-ascend-models {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    # Options that stand before the subcommand; its help is the app's.
    pass
