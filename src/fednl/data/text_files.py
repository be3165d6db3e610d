"""Reading a user's text file or JSON, with an error that names the file and shows nothing of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fednl.errors import DataError


def read_utf8(path: Path, source: str) -> str:
    """Gives a file's text, its line ends as they are, without a byte-order mark.

    Args:
        path: the file.
        source: what the error calls it.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8 (byte {error.start}); save it as UTF-8.") from None
    except OSError as error:
        raise DataError(f"{source} cannot be read ({error.strerror}).") from None


def read_json(text: str, where: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Gives what a text of JSON holds, whose strings can be written as UTF-8.

    Args:
        text: one JSON value.
        where: what the error begins with: the file, and the line if it is one.
        hook: makes something of an object's pairs, as `json.loads` does.

    Raises:
        DataError: it is not JSON, or is JSON that cannot be read: nested too deeply, a number of too many digits, half
            a surrogate pair.
    """
    try:
        value = json.loads(text, object_pairs_hook=hook)
        if "\\u" in text:  # only an escape can be half a pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON ({error.msg}); mend it.") from None
    except UnicodeEncodeError:
        raise DataError(
            f"{where} holds half a surrogate pair (\\ud800 to \\udfff), which is no text; mend it."
        ) from None
    except RecursionError:
        raise DataError(f"{where} is nested too deeply to be read; mend it.") from None
    except ValueError:
        raise DataError(f"{where} holds a number with too many digits to be read; mend it.") from None
    return value
