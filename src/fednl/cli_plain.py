"""Plain help: it reads the same on a terminal, in a pipe and in a file. Suggestions are left to click."""

from __future__ import annotations

from typing import Any

import click
from typer.core import TyperCommand

PLAIN: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,
    "suggest_commands": False,
}
"""What every group of verbs is made with."""


class Plain(TyperCommand):
    """A verb whose help has no backslash before a bracket: typer escapes it for markup that is off here."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the verb's help as it stands in its docstring."""
        super().format_help(ctx, formatter)
        formatter.buffer = [part.replace("\\[", "[") for part in formatter.buffer]
