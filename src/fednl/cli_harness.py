"""The verb of the command line that hands over to the LM evaluation harness."""

from __future__ import annotations

from typing import Annotated

import typer

from fednl.cli_plain import Plain


def add_harness(app: typer.Typer) -> None:
    """Gives the command line its verb `lm-eval`, whose arguments are the harness's own.

    Args:
        app: the command line.
    """
    app.command(
        "lm-eval",
        cls=Plain,
        short_help="Run the LM evaluation harness on a run.",
        # What follows is the harness's: its options are not looked for here.
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )(lm_eval)


def lm_eval(
    arguments: Annotated[
        list[str], typer.Argument(metavar="ARGS...", help="What `lm-eval` takes; --model fednl is added.")
    ],
) -> None:
    """Hand ARGS to the LM evaluation harness's own command line, with a run as the model `fednl`.

    --model_args run=RUN names the run; memory=closed shuts its memory. `fednl lm-eval run --help` prints what the
    harness takes. It needs the extra lm-eval: pip install "fednl[lm-eval]".

    \b
    Examples:
      fednl lm-eval --model_args run=runs/demo --tasks lambada_openai
      fednl lm-eval --model_args run=runs/demo,memory=closed --tasks arc_easy
    """
    from fednl.harness import lm_eval as run_harness

    run_harness(arguments)
