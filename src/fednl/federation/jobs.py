"""Asks a pool for a job, and turns what went wrong in it into the error it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fednl import errors
from fednl.errors import FednlError
from fednl.federation.inline import Pool
from fednl.federation.pool import Job, Result

_NO_MEMORY = ("MemoryError", "OutOfMemoryError")


def do(pool: Pool, job: Job, on_progress: Callable[[Job, dict[str, Any]], None] | None = None) -> Result:
    """Has one job done.

    Args:
        pool: who does it.
        job: what is to be done.
        on_progress: is told (job, facts) meanwhile.

    Raises:
        FednlError: the job failed; see `answer_of`.
    """
    result = next(iter(pool.map([job], on_progress)))
    answer_of(result)
    return result


def answer_of(result: Result) -> dict[str, Any]:
    """Gives what a job answered.

    Raises:
        FednlError: of the kind and with the words it was raised with, where it was one of this library's.
    """
    answer: dict[str, Any] = result.header["answer"]
    if result.header["status"] == "ok":
        return answer
    op, where = result.job.op, answer.get("where", "an unknown place")
    if result.header["status"] == "lost":
        raise FednlError(f"A worker process ended while it was at {op!r}; free memory and resume the run.")
    kind: Any = getattr(errors, answer["type"], None)
    if kind is not None and issubclass(kind, FednlError) and kind is not errors.MessageError:
        raise kind(answer["message"])
    if answer["type"] in _NO_MEMORY:
        raise FednlError(
            f"Memory ran out at {op!r} ({where}); lower training.batch, evaluation.batch or "
            "federation.parallel-clients, and go on with `fednl train --resume`."
        )
    raise FednlError(f"{answer['type']} at {where} during {op!r}; this is a fault of fednl: please report it.")
