"""Turns whatever is wrong with settings into one sentence: the place, the key, the value, the remedy."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import ValidationError

from fednl.errors import SettingsError

Others: TypeAlias = Mapping[str, tuple[str, Sequence[str]]]
_NONE: Others = {}


class Checker:
    """Checks tables of settings.

    Args:
        where: what an error names as the place, usually the file.
        overridden: the `section.key` names that came from `--set`; an error then names `--set` instead.
        others: by key, the section that it stands in and the words that it takes: names of sections that are perhaps
            not read now, yet are no misspelling.
    """

    def __init__(self, where: str, overridden: frozenset[str] = frozenset(), others: Others = _NONE) -> None:
        self.where = where
        self.overridden = overridden
        self.others = others

    def place(self, section: str, key: str) -> str:
        """Where a key was written: the file, or `--set`."""
        return "--set:" if f"{section}.{key}" in self.overridden else f"{self.where}:"

    def sections(self, table: Mapping[str, Any], keys: Mapping[str, list[str]], own: Mapping[str, str]) -> None:
        """Refuses unknown sections, then unknown keys in known ones; `own` names the algorithm and the task."""
        for section, content in table.items():
            if section not in keys and section not in own.values():
                raise SettingsError(f"{self.where}: {self._unknown_section(section, content, keys, own)}")
            if not isinstance(content, Mapping):
                raise SettingsError(f"{self.where}: {section} must be a section: write [{section}] above its keys.")
        for section, known in keys.items():
            for key in table.get(section, {}):
                if key not in known:
                    hint = hint_for(key, known, "keys", _elsewhere(key, section, keys))
                    raise SettingsError(f'{self.place(section, key)} unknown key "{key}" in [{section}]; {hint}')

    def section(self, name: str, kind: Any, content: Mapping[str, Any]) -> Any:
        """Builds one section; JSON mode is strict about kinds, yet lets a list fill a tuple."""
        known = keys_of(kind)
        for key in content:
            if key not in known:
                hint = hint_for(key, known, "keys")
                raise SettingsError(f'{self.place(name, key)} unknown key "{key}" in [{name}]; {hint}')
            if isinstance(content[key], float) and not math.isfinite(content[key]):
                raise SettingsError(f"{self.place(name, key)} [{name}] {key} = {content[key]}: write a finite number.")
        try:
            return kind.model_validate_json(json.dumps(dict(content), default=str))
        except ValidationError as error:
            raise SettingsError(self._sentence(name, kind, error)) from None

    def _sentence(self, section: str, kind: Any, error: ValidationError) -> str:
        first = error.errors(include_url=False)[0]
        reason = re.sub(r"^(Value error|Assertion failed), ", "", first["msg"])
        reason = reason.removeprefix("Input ").rstrip(".")
        if not first["loc"]:
            return f"{self.where}: [{section}] {reason}."
        key, value = str(first["loc"][0]), first["input"]
        if first["type"] in ("missing", "too_long") and (wanted := _length(kind, key)):
            value = list(value)
            reason = f"write {wanted} values, not {len(value)}"
        allowed = re.findall(r"'([^']*)'", str(first.get("ctx", {}).get("expected", "")))
        close = difflib.get_close_matches(str(value), allowed, n=1)
        end = f'; did you mean "{close[0]}"?' if close else "."
        return f"{self.place(section, key)} [{section}] {key} = {_shown(value)}: {reason}{end}"

    def _unknown_section(
        self, section: str, content: Any, keys: Mapping[str, list[str]], own: Mapping[str, str]
    ) -> str:
        for key, (home, names) in self.others.items():
            if isinstance(content, Mapping) and section in names:
                return (
                    f'[{section}] is set, but [{home}] {key} = "{own[key]}" would not read it; '
                    f'remove it or set {key} = "{section}".'
                )
        if not isinstance(content, Mapping):
            hint = _elsewhere(section, "", keys) or "move it into its section."
            return f'the key "{section}" stands above every section; {hint}'
        return f"unknown section [{section}]; {hint_for(section, [*keys, *own.values()], 'sections')}"


def named(table: Mapping[str, Any], section: str, key: str, default: str) -> str:
    """Gives the algorithm or task that a table names, which is also the name of that one's own section."""
    keys = table.get(section, {})
    name = keys.get(key) if isinstance(keys, Mapping) else None
    return name if isinstance(name, str) else default


def keys_of(kind: Any) -> list[str]:
    """Lists the keys of a section's class, in kebab-case."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def _length(kind: Any, key: str) -> int:
    """How many values a key takes that takes a fixed number of them; 0 for others."""
    annotation = next(field.annotation for name, field in kind.model_fields.items() if key in (name, field.alias))
    parts = get_args(annotation)
    return len(parts) if get_origin(annotation) is tuple and Ellipsis not in parts else 0


def hint_for(word: str, known: Sequence[str], what: str, elsewhere: str = "") -> str:
    """Names the nearest known word, else where the word belongs, else every known word; ends the sentence."""
    close = difflib.get_close_matches(word.replace("_", "-").lower(), known, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    return elsewhere or (f"the {what} are: {', '.join(known)}." if known else f"it has no {what}.")


def _elsewhere(key: str, section: str, keys: Mapping[str, list[str]]) -> str:
    homes = [other for other, known in keys.items() if other != section and key.replace("_", "-") in known]
    return f"it belongs in [{homes[0]}]." if homes else ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
