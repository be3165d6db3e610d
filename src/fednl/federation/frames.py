"""How this process and its workers talk: JSON headers and raw blobs over a pipe. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from fednl.errors import FednlError, MessageError

MARK = b"\x00fednl-frames-1\x00"
"""A worker's first bytes; whatever was printed before them is no frame."""

_MOST_HEADER_BYTES = 2**26
_WATCH_S = 1.0

Blobs: TypeAlias = Sequence[bytes]
OnProgress: TypeAlias = Callable[[dict[str, Any]], None]
Handler: TypeAlias = Callable[[dict[str, Any], list[bytes], OnProgress], tuple[dict[str, Any], Blobs]]


def encode_header(header: Mapping[str, Any], blobs: Blobs = ()) -> bytes:
    """Gives a frame up to its blobs: the header's length, then the header with the blobs' lengths.

    NaN is allowed: these pipes are between processes of the same library.
    """
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode("utf-8")
    return len(text).to_bytes(8, "little") + text


def write_frame(stream: IO[bytes], header: Mapping[str, Any], blobs: Blobs = ()) -> None:
    """Writes one frame: the header, then the blobs as they are."""
    _write(stream, encode_header(header, blobs), blobs)


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], list[bytes]] | None:
    """Reads one frame; None if the stream ended, also in the middle of one."""
    prefix = stream.read(8)
    if len(prefix) < 8:
        return None
    length = int.from_bytes(prefix, "little")
    text = stream.read(length) if length <= _MOST_HEADER_BYTES else b""
    if len(text) < length:
        return None
    header = json.loads(text)
    lengths = header.pop("blobs")
    blobs = [stream.read(size) for size in lengths]
    return (header, blobs) if [len(blob) for blob in blobs] == lengths else None


def skip_to_mark(stream: IO[bytes]) -> bool:
    """Reads past what a worker printed while it started; False if the stream ended before its mark."""
    seen = b""
    while not seen.endswith(MARK):
        byte = stream.read(1)
        if not byte:
            return False
        seen = seen[-len(MARK) :] + byte
    return True


def describe_failure(error: BaseException) -> dict[str, str]:
    """Says what went wrong without the words of the error, which may quote private text.

    Args:
        error: what was raised.

    Returns:
        `type`, `where` (file and line), `code` of a MessageError, and `message` only of this library's own
        errors, which never hold private text.
    """
    facts = {"type": type(error).__name__}
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        facts["where"] = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
    if isinstance(error, MessageError):
        facts["code"] = error.code
    if isinstance(error, FednlError):
        facts["message"] = str(error)
    return facts


def serve(handlers: Mapping[str, Handler]) -> None:
    """Is a worker's main loop: answers jobs from standard input until it ends.

    Standard output belongs to the frames from here on; what any code prints goes to standard error. The process
    ends with its parent, whatever it is at.

    Args:
        handlers: by operation, what takes (header, blobs, on_progress) and gives (header, blobs). Of an
            exception, type and place travel; the words only of a FednlError.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), name="fednl-parent", daemon=True).start()
    sys.stdout.flush()
    frames_in, frames_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(BrokenPipeError), frames_in, frames_out:  # a parent that is gone reads no answer
        frames_out.write(MARK)
        frames_out.flush()
        while (frame := read_frame(frames_in)) is not None:
            _write(frames_out, *_answer(handlers, *frame, frames_out))


def _end_with(parent: int) -> None:
    """Ends this process once its parent is gone, also in the middle of a long job that writes nothing."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


def _answer(
    handlers: Mapping[str, Handler], header: dict[str, Any], blobs: list[bytes], out: IO[bytes]
) -> tuple[bytes, Blobs]:
    """Does one job; what can go wrong in it, up to an answer that is not JSON, becomes a failed answer."""

    def on_progress(facts: dict[str, Any]) -> None:
        write_frame(out, {"kind": "progress", "facts": facts})

    try:
        answer, parts = handlers[header["op"]](header["job"], blobs, on_progress)
        return encode_header({"kind": "result", "status": "ok", "answer": answer}, parts), parts
    except BrokenPipeError:  # nobody reads any more: the parent is gone, so the worker ends
        raise
    except Exception as error:
        return encode_header({"kind": "result", "status": "failed", "answer": describe_failure(error)}), ()


def _write(stream: IO[bytes], head: bytes, blobs: Blobs) -> None:
    stream.write(head)
    for blob in blobs:
        stream.write(blob)
    stream.flush()
