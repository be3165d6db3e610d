"""Reading a user's text file, with an error that names the file and shows nothing of it."""

from __future__ import annotations

from pathlib import Path

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
