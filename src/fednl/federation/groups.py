"""Which rules travel, by their names: groups, presets, patterns. Imports no torch."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fednl.errors import SettingsError

if TYPE_CHECKING:
    from fednl.federation.algorithms.fedavg import FedAvg

SHARED_PRESETS: dict[str, tuple[str, ...]] = {
    "memory": ("write", "gate"),
    "theta": ("write", "gate", "projection", "address"),
    "lora": ("lora",),
    "context": ("coefficients",),
    "all": ("*",),
}
"""Names for what usually travels; each stands for groups, or for the pattern that matches every name."""


GROUPS = ("write", "gate", "projection", "address", "lora", "coefficients", "vectors")
"""The groups that rules of any adapter are in."""


def group_of(name: str) -> str:
    """Tells the group of a rule by its canonical name; empty for a name of neither known form.

    Args:
        name: `layers.{i}.memory.{group}.{tensor}`, `layers.{i}.{module}.lora_A` or `context.{group}`.
    """
    parts = name.split(".")
    if parts[0] == "context":
        return parts[1]
    if "memory" in parts[:-2]:
        return parts[parts.index("memory") + 1]
    return "lora" if parts[-1].startswith("lora_") else ""


def select(names: Iterable[str], shared: str | Sequence[str]) -> list[str]:
    """Lists, sorted, the names that a `shared` setting lets out.

    Args:
        names: canonical names.
        shared: a preset, a group, a shell-style pattern of names, or a list of these, perhaps empty.
    """
    entries = _entries(shared)
    return sorted(name for name in names if any(_matches(name, entry) for entry in entries))


def check_words(shared: str | Sequence[str]) -> None:
    """Refuses, where names are not known yet, an entry that could match none: a word, and neither preset nor group.

    Args:
        shared: as in `select`.

    Raises:
        ValueError: says which words there are.
    """
    known = list(dict.fromkeys([*SHARED_PRESETS, *GROUPS]))
    for word in [shared] if isinstance(shared, str) else shared:
        if word.isidentifier() and word not in known:
            close = difflib.get_close_matches(word, known, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"these are {', '.join(known)}."
            raise ValueError(f'"{word}" is neither a preset, a group nor a pattern; {hint}')


def may_let_out(shared: str | Sequence[str], group: str, ending: str = "") -> bool:
    """Says, where names are not known yet, whether a `shared` setting may let rules of a group out.

    Args:
        shared: as in `select`; a pattern may, if it can end as their names do.
        group: as `group_of` gives it.
        ending: how the names of these rules end, such as `".lora_B"`.
    """
    for entry in _entries(shared):
        literal = re.split(r"[*?\]]", entry)[-1]
        fits = literal.endswith(ending) or ending.endswith(literal)
        if entry == group or (not entry.isidentifier() and fits):
            return True
    return False


def check_shared(algorithm: FedAvg, names: Iterable[str]) -> tuple[str, ...]:
    """Refuses a `shared` setting of which a part matches nothing, or that leaves nothing to travel.

    A misspelt group would share too little, and an algorithm may keep to clients all that the setting names.

    Args:
        algorithm: with the setting, as `lets_out`; one that shares nothing at all is not checked.
        names: the canonical names there are.

    Returns:
        The names that travel.

    Raises:
        SettingsError: a preset, group or pattern matches none of the names, or nothing travels.
    """
    names = list(names)
    travels = tuple(algorithm.shared(names))
    if not algorithm.traits.shares:
        return travels
    shared = algorithm.lets_out
    groups = ", ".join(sorted({group_of(name) for name in names} - {""})) or "none"
    for entry in [shared] if isinstance(shared, str) else shared:
        if not select(names, entry):
            raise SettingsError(
                f'[federation] shared = "{entry}" matches none of the rules (groups here: {groups}): '
                f"name a group, a preset ({', '.join(SHARED_PRESETS)}) or a pattern of names."
            )
    if not travels:
        raise SettingsError(
            f"[federation] shared = {json.dumps(shared)} lets nothing out, as {type(algorithm).__name__} keeps all "
            f"that it names to each client: name more (groups here: {groups})."
        )
    return travels


def shared_groups(algorithm: FedAvg, names: Iterable[str]) -> list[str]:
    """Says in few words what leaves a client: the groups that travel whole, then entries of `shared` for the rest.

    Args:
        algorithm: with the setting, as `lets_out`.
        names: the canonical names there are.
    """
    names, shared = list(names), algorithm.lets_out
    travels = set(select([*algorithm.shared(names), *algorithm.given(names)], shared))
    known = [*SHARED_PRESETS["theta"], *sorted({group_of(name) for name in names} - {""})]
    whole = []
    for group in dict.fromkeys(known):
        members = {name for name in names if group_of(name) == group}
        if members and members <= travels:
            whole.append(group)
    rest = [name for name in travels if group_of(name) not in whole]
    return whole + [entry for entry in _entries(shared) if any(_matches(name, entry) for name in rest)]


def _entries(shared: str | Sequence[str]) -> list[str]:
    listed = [shared] if isinstance(shared, str) else shared
    return [part for entry in listed for part in SHARED_PRESETS.get(entry, (entry,))]


def _matches(name: str, entry: str) -> bool:
    return group_of(name) == entry or fnmatchcase(name, entry)
