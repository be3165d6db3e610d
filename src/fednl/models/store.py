"""The cache folder for converted models: one writer at a time, whole copies or none."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fednl.errors import BackboneError
from fednl.fetching import cache_folder

Progress = Callable[[str], None]

MANIFEST = "fednl.json"
# Raised when the conversion itself changes, so that copies made by an older release are made again.
CONVERSION = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)


def sha256_of(file: Path) -> str:
    """Gives the sha256 of a file, as hexadecimal text."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_complete(folder: Path, source_sha256: str, dtype: str) -> bool:
    """Tells whether a converted copy is whole and was made from the expected source by this conversion.

    Reads the manifest and the files' sizes, not their contents: it takes well under a millisecond.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["conversion"] == CONVERSION
            and manifest["source"]["sha256"] == source_sha256
            and manifest["dtype"] == dtype
            and all((folder / file).stat().st_size == size for file, size in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def work_folder(folder: Path, need_bytes: int, say: Progress) -> Iterator[Path]:
    """Yields an empty folder beside `folder`, on the same disk, while holding the lock on `folder`.

    The lock belongs to the process, so a killed one frees it; what it left behind is removed here. The work
    folder goes away at the end, however the block ends.

    Args:
        folder: what is to be made; its parent is made if missing.
        need_bytes: refuse at once unless the disk has this much free.
        say: is told when another process holds the lock.

    Raises:
        BackboneError: the disk is full, or the cache folder cannot be written.
    """
    from filelock import FileLock, Timeout

    parent, prefix = folder.parent, f".{folder.name}.work-"
    lock = FileLock(parent / f"{folder.name}.lock")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting for another process that is making {folder.name}")
            lock.acquire()
        try:
            for left in parent.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
            if shutil.disk_usage(parent).free < need_bytes:
                raise _no_space(need_bytes)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as work:
                yield Path(work)
        finally:
            lock.release()
    except Exception as error:
        # safetensors reports a full disk as its own error type, with the system's text.
        if getattr(error, "errno", None) in _FULL or "No space left" in str(error):
            raise _no_space(need_bytes) from error
        if isinstance(error, OSError) and error.errno is not None:
            raise BackboneError(
                f"the cache folder {cache_folder()} cannot be used ({error.strerror}); "
                "set FEDNL_CACHE to a folder you can write."
            ) from error
        raise


def publish(made: Path, folder: Path, description: dict[str, Any], aside: Path) -> None:
    """Writes the manifest into a finished folder, flushes it to disk, and renames it into place.

    Args:
        made: the finished folder, on the same disk as `folder`.
        folder: where readers look.
        description: what the manifest says besides formats, versions and files: name, source, dtype.
        aside: an outdated `folder` is moved here first.
    """
    packages = ("fednl", "torch", "transformers", "gguf", "safetensors")
    manifest = {
        "format": 1,
        "conversion": CONVERSION,
        **description,
        "converter": {package: _version(package) for package in packages},
        "files": {file.name: file.stat().st_size for file in sorted(made.iterdir())},
    }
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for file in made.iterdir():
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
    if folder.exists():
        folder.rename(aside)
    made.rename(folder)


def _no_space(need_bytes: int) -> BackboneError:
    folder = cache_folder()
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return BackboneError(
        f"the cache folder {folder} has {shutil.disk_usage(there).free:,} bytes free and the model needs "
        f"{need_bytes:,}; free some space, or set FEDNL_CACHE to a folder on a larger disk."
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
