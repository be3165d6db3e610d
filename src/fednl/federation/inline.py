"""The pool that is no pool: jobs are done in this process, with the handlers a worker process would have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from fednl.federation.frames import Handler, describe_failure
from fednl.federation.pool import Job, Result, late


class Pool(Protocol):
    """Whoever does jobs: worker processes (`WorkerPool`), or this process (`InlinePool`)."""

    def map(
        self,
        jobs: Iterable[Job],
        on_progress: Callable[[Job, dict[str, Any]], None] | None = None,
        deadline_s: float | None = None,
    ) -> Iterator[Result]:
        """Does the jobs and gives results as they come."""
        ...

    def close(self) -> None:
        """Ends whatever does the jobs."""
        ...


class InlinePool:
    """Does the jobs one after another in this process, which cannot cut one off.

    Args:
        handlers: by operation, as for `serve`.
    """

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    def map(
        self,
        jobs: Iterable[Job],
        on_progress: Callable[[Job, dict[str, Any]], None] | None = None,
        deadline_s: float | None = None,
    ) -> Iterator[Result]:
        """Does the jobs in their order; one that takes longer than the deadline is `"late"`, but is waited for.

        Only another process can end a job that hangs: that is `WorkerPool`.
        """
        for job in jobs:
            began_s = time.monotonic()
            result = self._do(job, on_progress)
            yield result if deadline_s is None or time.monotonic() - began_s <= deadline_s else late(job)

    def close(self) -> None:
        """Has nothing to end."""

    def _do(self, job: Job, on_progress: Callable[[Job, dict[str, Any]], None] | None) -> Result:
        def tell(facts: dict[str, Any]) -> None:
            if on_progress is not None:
                on_progress(job, facts)

        try:
            answer, blobs = self._handlers[job.op](dict(job.header), list(job.blobs), tell)
        except Exception as error:
            return Result(job, {"status": "failed", "answer": describe_failure(error)}, [])
        return Result(job, {"status": "ok", "answer": answer}, list(blobs))
