"""`[federation] preset`: one word for the settings of a published method, replaced by them when settings are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fednl.config_check import Checker, hint_for
from fednl.config_text import parse_override
from fednl.errors import SettingsError

_PLACE = ("federation", "preset")


@dataclass(frozen=True)
class Made:
    """From which preset settings were made; no reason for two to differ.

    Args:
        preset: its name; empty for none.
    """

    preset: str = field(default="", compare=False)


def expanded(table: Mapping[str, Any], check: Checker) -> tuple[Mapping[str, Any], Made]:
    """Gives a table of sections with its preset's settings in place of the word, and the word.

    Settings that are there win.

    Args:
        table: section name to (key to value); not modified.
        check: says where a key was written.

    Raises:
        SettingsError: there is no such preset.
    """
    section, key = _PLACE
    keys = table.get(section)
    if not isinstance(keys, Mapping) or key not in keys:
        return table, Made()
    made = {**table, section: {name: value for name, value in keys.items() if name != key}}
    for name, preset in _settings(keys[key], check).items():
        own = made.get(name, {})
        made[name] = {**preset, **own} if isinstance(own, Mapping) else own
    return made, Made(keys[key])


def without(table: dict[str, Any], made: Made, overrides: Sequence[str]) -> dict[str, Any]:
    """Gives a table without what a preset has set in it, if overrides name another preset.

    Args:
        table: section name to (key to value), complete; modified.
        made: from which preset it was made.
        overrides: as for `parsed`.
    """
    from fednl.federation.algorithms import PRESETS

    if made.preset and any((section, key) == _PLACE for section, key, _ in map(parse_override, overrides)):
        for section, keys in PRESETS[made.preset].items():
            for key, value in keys.items():
                if table[section].get(key) in (value, [value]):  # else it was set beside the preset
                    del table[section][key]
    return table


def parsed(overrides: Sequence[str]) -> list[tuple[str, str, Any]]:
    """Takes overrides apart into (section, key, value); a preset's settings come first, so that the others win.

    A preset here wins over what a file says, as every override does; of several the last.

    Args:
        overrides: `"section.key=value"` each.

    Raises:
        SettingsError: an override is not readable, or there is no such preset.
    """
    read = [parse_override(override) for override in overrides]
    check = Checker("settings", frozenset({".".join(_PLACE)}))
    first: list[tuple[str, str, Any]] = []
    for section, key, value in read:
        if (section, key) == _PLACE:
            preset = _settings(value, check)
            first = [(section, key, value) for section, keys in preset.items() for key, value in keys.items()]
    return first + read


def _settings(name: Any, check: Checker) -> dict[str, dict[str, Any]]:
    from fednl.federation.algorithms import PRESETS

    if not isinstance(name, str) or name not in PRESETS:
        hint = hint_for(str(name), list(PRESETS), "presets")
        raise SettingsError(f"{check.place(*_PLACE)} [federation] preset = {json.dumps(name)} is unknown; {hint}")
    return PRESETS[name]
