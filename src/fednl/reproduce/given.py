"""Settings from the command line: which runs of a table they reach, and how a page writes them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fednl.config import Config
from fednl.config_text import parse_override, toml_value
from fednl.errors import SettingsError
from fednl.reproduce.table import Method, Table

ONLY_ASKED = ("data.test", "evaluation.batch")
"""What of a given setting is only how a run is asked, where other questions than its own are asked for."""
_OF_THE_TABLE = ("data.task",)
_SHOWN = 5


def key_of(one: str) -> str:
    """The key of `"section.key=value"`.

    Raises:
        SettingsError: it is not of this form.
    """
    section, key, _ = parse_override(one)
    return f"{section}.{key}"


def reaching(given: Sequence[str], method: Method) -> list[str]:
    """Those settings that a method takes: all but of the keys that make it what it is."""
    own = set(map(key_of, method.sets))
    return [one for one in given if key_of(one) not in own]


def check_given(given: Sequence[str], table: Table, runs: Mapping[Method, Config]) -> None:
    """Refuses settings that no run would take, or that make two runs of a table the same under two names.

    Args:
        given: `"section.key=value"` each.
        table: the table.
        runs: its methods with their settings, these among them.

    Raises:
        SettingsError: names the key and the methods.
    """
    for one in given:
        key = key_of(one)
        if key in _OF_THE_TABLE:
            raise SettingsError(f"--set {one}: {key} is what makes the table {table.name}: leave it away.")
        if not any(reaching([one], method) for method in runs):
            names = [method.name for method in runs]
            shown = ", ".join(names[:_SHOWN]) + (" and the others" if len(names) > _SHOWN else "")
            raise SettingsError(
                f"--set {one}: the runs of the table {table.name} ({shown}) each set their own {key}, which makes them "
                "what they are: leave it away."
            )
    seen: dict[str, str] = {}
    for method, config in runs.items() if given else ():
        if (same := seen.setdefault(config.hash, method.name)) != method.name:
            words = " ".join(f"--set {one}" for one in given)
            raise SettingsError(
                f"{words}: {same} and {method.name} of the table {table.name} would be one run under two names; give "
                "another value."
            )


def kept_own(given: Sequence[str], methods: Sequence[Method]) -> list[str]:
    """Says which runs keep what makes them what they are, where the command line gives something else."""
    lines = []
    for one in given:
        own = [f"{method.name} (`{mine}`)" for method in methods for mine in method.sets if key_of(mine) == key_of(one)]
        lines += [f"- `{without_folders(one)}`: not {', '.join(own)}"] if own else []
    return ["What makes a run what it is, `--set` does not replace:", "\n".join(lines)] if lines else []


def without_folders(one: str) -> str:
    """A setting as a page writes it: of an absolute path the last part, as the user's folders are nobody's business."""
    section, key, value = parse_override(one)
    shown = _name_only(value)
    return one if shown == value else f"{section}.{key}={toml_value(shown)}"


def path_told(path: Path) -> str:
    """A path as a page writes it."""
    return str(_name_only(str(path)))


def _name_only(value: Any) -> Any:
    if isinstance(value, list):
        return [_name_only(one) for one in value]
    if isinstance(value, str) and (Path(value).is_absolute() or value.startswith(("~", ".."))):
        return f".../{Path(value).name}"
    return value
