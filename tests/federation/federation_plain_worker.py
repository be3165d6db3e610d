"""A worker process without torch, for tests of the pool."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from fednl.errors import DataError
from fednl.federation.frames import serve

if "broken" in sys.argv:
    sys.exit(3)
if "stuck" in sys.argv and not os.path.exists(sys.argv[-1]):
    open(sys.argv[-1], "w").close()
    time.sleep(600)
print("printed before the first frame, without an end", end="")


def echo(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
    print("printed by a handler")
    os.write(1, b"written to the descriptor")
    for step in range(job.get("steps", 0)):
        tell({"step": step})
    return {**job, "pid": os.getpid()}, [blob[::-1] for blob in blobs]


def sleep(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
    tell({"pid": os.getpid()})
    time.sleep(job["seconds_s"])
    return {}, ()


def private(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
    raise ValueError("the patient's name is Ada")


def known(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
    raise DataError("the file is empty.")


def kill(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def odd(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
    return {"not JSON": object()}, ()


if __name__ == "__main__":
    serve({"echo": echo, "sleep": sleep, "private": private, "known": known, "kill": kill, "odd": odd})
