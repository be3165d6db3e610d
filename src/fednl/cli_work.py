"""What the verbs of the command line share: beginning or taking up a run, progress, the written report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_DIGITS, _SHOWN = 9, 60


def starting(file: Path, overrides: Sequence[str], out: Path | None) -> tuple[Path, Callable[[Any], object]]:
    """A new run: its folder, and the work."""
    from fednl.config import load_config
    from fednl.runs import Run

    settings = load_config(file, overrides)
    # Made now: a folder that is taken or cannot be written is told before anything heavy loads.
    path = (Run.at(out) if out is not None else Run.create(Path(settings.run.out), file.stem)).path

    def work(on_event: Any) -> object:
        from fednl.training import train as run_training

        return run_training(settings, path, on_event)

    return path, work


def resuming(run: Path) -> Callable[[Any], object]:
    """An earlier run's work from where it stopped."""
    from fednl.runs import Run

    Run.open(run)  # a mistyped name is told at once, before anything heavy loads

    def work(on_event: Any) -> object:
        from fednl.training import resume as resume_training

        return resume_training(run, on_event)

    return work


def reproduced(name: str, scale: str, out: Path | None, lengths: str, facts: str, given: Sequence[str]) -> str:
    """Does what a published table lacks, and gives it as Markdown.

    Args:
        name: the table.
        scale: the scale.
        out: the folder of its runs; None for the usual one.
        lengths: prompt lengths with commas between; empty for the scale's.
        facts: facts in a prompt, likewise.
        given: settings from the command line.
    """
    from fednl.errors import Interrupted
    from fednl.reproduce import check_scale, table_named

    table = table_named(name)
    check_scale(scale, table)
    folder = out or Path("runs") / f"reproduce-{name}-{scale}"
    size = table.scales[scale]
    tokens = _numbers("--lengths", lengths, size.lengths, table.name, "prompt lengths", "prompt tokens")
    hidden = _numbers("--facts", facts, size.facts, table.name, "facts in its prompts", "facts a prompt")

    def work(on_event: Any) -> Any:
        from fednl.reproduce.sitting import Sitting

        return Sitting(table, scale, folder, given, tokens, hidden, on_event).whole()

    try:
        return str(watched(work).text)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(f"Interrupted; what was done is kept in {folder}: the same command goes on.") from None


def _numbers(option: str, text: str, usual: Sequence[int], table: str, has: str, what: str) -> tuple[int, ...]:
    """Reads an option of numbers with commas between, for a table that has such numbers of its own."""
    from fednl.errors import SettingsError

    if text and not usual:
        raise SettingsError(f"{option} {text}: the table {table} has no {has}; leave it away.")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    counts = all(part.isascii() and part.isdigit() and len(part) <= _DIGITS and int(part) for part in parts)
    if text and not (parts and counts):
        numbers = ",".join(map(str, (*usual, 2 * max(usual))))
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise SettingsError(f"{option} {shown}: write {what} with commas between, for example {numbers}.")
    return tuple(sorted({int(part) for part in parts}))


def watched(work: Callable[[Any], Any]) -> Any:
    """Does the work under the progress display."""
    from fednl.progress import Progress

    with Progress() as on_event:
        return work(on_event)


def written_report(run: Path) -> str:
    """Writes the run's tables beside its results, and gives them."""
    from fednl.report.tables import report as tables
    from fednl.runs import Run

    text = tables([run])
    Run(run).write_text("report.md", text)
    return text


def as_notes(on_event: Callable[[Mapping[str, Any]], None]) -> Callable[[str], None]:
    """What is said in one line, shown as a note by the progress display."""
    return lambda text: on_event({"event": "note", "text": text})
