"""Clients in worker processes on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fednl.federation.frames import Blobs, Handler, OnProgress, serve
from fednl.federation.inline import InlinePool, Pool
from fednl.federation.pool import Job, Result, WorkerPool
from fednl.federation.transport import Endpoint, OnClient, Reply, SimulatedTransport, call_endpoint

__all__ = ["InlinePool", "Job", "Pool", "ProcessTransport", "Result", "WorkerPool", "serve", "train_handler"]


class ProcessTransport(SimulatedTransport):
    """Runs clients in worker processes; the results do not depend on how many there are.

    Args:
        pool: workers with a handler for the operation `"train"`, see `train_handler`. `close` ends them.
        clients: names, or name to training examples.
        facts: what else every job's header says, such as which arm of a comparison this is.
    """

    def __init__(
        self,
        pool: Pool,
        clients: Iterable[str] | Mapping[str, int],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(clients)
        self._pool, self._facts = pool, dict(facts or {})

    def replies(self, deadline_s: float | None, on_progress: OnClient | None = None) -> Iterator[Reply]:
        """Lets the asked clients work and gives replies as they come.

        A client whose worker dies is lost for this round, and one that has not answered at its deadline is late; the
        state of either is unchanged.

        Args:
            deadline_s: seconds from when a worker begins with a client, for each anew; None for no deadline.
            on_progress: is told (client, facts) while clients work.
        """
        jobs = [
            Job("train", {**self._facts, "client": client}, (payload, state))
            for client, payload, state in self._take_asked()
        ]

        def tell(job: Job, facts: dict[str, Any]) -> None:
            if on_progress is not None:
                on_progress(job.header["client"], facts)

        for job, header, blobs in self._pool.map(jobs, tell, deadline_s):
            client = job.header["client"]
            if header["status"] == "failed":
                yield Reply.failed(client, header["answer"])
            elif header["status"] == "lost":
                yield Reply(client, status="lost", reason="lost", detail="its worker process ended")
            elif header["status"] == "late":
                yield Reply(client, status="late")
            else:
                reply, self._states[client] = blobs
                yield Reply(client, reply)

    def close(self) -> None:
        """Ends the workers."""
        self._pool.close()


def train_handler(endpoint: Endpoint) -> Handler:
    """Makes the worker's handler for the operation `"train"` out of a client's side.

    Args:
        endpoint: what a client does with a message and its state.
    """

    def handle(job: dict[str, Any], blobs: list[bytes], on_progress: OnProgress) -> tuple[dict[str, Any], Blobs]:
        payload, state = blobs
        return {}, call_endpoint(endpoint, job["client"], payload, state, lambda _, facts: on_progress(facts))

    return handle
