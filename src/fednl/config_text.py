"""Settings as text: TOML files, what `--set` gives, and values as TOML writes them."""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Any

from fednl.errors import SettingsError


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a settings file.

    Raises:
        SettingsError: the file is missing, cannot be read, or is not TOML.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a byte-order mark is no part of the settings
    except FileNotFoundError:
        near = sorted(str(other) for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(str(path), near, n=1)
        hint = f"did you mean {close[0]}?" if close else "check the name."
        raise SettingsError(f"there is no settings file {path}; {hint}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text: save it as UTF-8.") from None
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror or error}.") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}.") from None


def parse_override(text: str) -> tuple[str, str, Any]:
    """Takes `"section.key=value"` apart: section, key, and the value as TOML reads it, else as a word.

    Raises:
        SettingsError: it is not of this form.
    """
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise SettingsError(f'--set {text}: write section.key=value, for example "--set training.rounds=2".')
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return section, key, value.strip()
    return section, key, parsed["value"] if set(parsed) == {"value"} else value


def toml_value(value: Any) -> str:
    """Writes a string, number, boolean or list of them as TOML does."""
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)  # TOML writes strings, numbers and booleans as JSON does
