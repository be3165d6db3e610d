"""Files that are whole or absent: written beside their place, flushed to disk, renamed into it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fednl.errors import FednlError


def write_atomic(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Puts `content` at `path` whole or not at all: a file beside it, flushed to disk, then renamed.

    Args:
        path: where; its folder must exist.
        content: the whole file.
        mode: the file's permissions from its first byte on, for example 0o600; None for the system's usual ones.

    Raises:
        OSError: the disk refused; whatever was at `path` is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else mode)

    try:
        with open(temporary, "wb", opener=opened) as file:
            if mode is not None:  # also for what a killed process left under this name
                os.chmod(temporary, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes a rename inside `path` survive a power cut, where the system knows how."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def private_folder(prefix: str) -> Iterator[Path]:
    """Makes a folder for this user only among the system's temporary ones, and takes it away with all that is in it.

    Args:
        prefix: what its name begins with.

    Raises:
        FednlError: there is no place for it.
    """
    with writing(Path(tempfile.gettempdir())):
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a full disk or a forbidden folder into one sentence.

    Args:
        path: what is written inside the block, as the sentence names it.

    Raises:
        FednlError: the disk or the system refused.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise FednlError(f"cannot write {path}: {reason}; free some space or choose another folder.") from None
