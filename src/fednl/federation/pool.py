"""A pool of worker processes that outlives its workers. Imports no torch.

A worker is `python -m MODULE ARGS`: a module that loads what it needs, then calls `serve(handlers)`. Jobs
go to whichever worker is free, so what a job gives must depend on the job alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, NamedTuple, TypeAlias

from fednl.errors import FednlError
from fednl.federation.frames import Blobs, read_frame, skip_to_mark, write_frame

_STARTS = 2


@dataclass(frozen=True, eq=False)
class Job:
    """One piece of work.

    Args:
        op: the name of the handler in the worker.
        header: what JSON can hold.
        blobs: bytes, such as serialised messages.
    """

    op: str
    header: Mapping[str, Any] = field(default_factory=dict)
    blobs: Blobs = ()


class Result(NamedTuple):
    """What became of a job.

    `header["status"]` is `"ok"`, and `header["answer"]` what the handler gave; or `"failed"`, and
    `header["answer"]` what `describe_failure` says; or `"lost"`: the worker ended in the middle of the job; or
    `"late"`: it took longer than it may, and nothing more will be heard of it.
    """

    job: Job
    header: dict[str, Any]
    blobs: list[bytes]


def late(job: Job) -> Result:
    """Gives what is said of a job that took longer than it may."""
    return Result(job, {"status": "late", "answer": {}}, [])


class _Progress(NamedTuple):
    job: Job
    facts: dict[str, Any]


_Told: TypeAlias = Result | _Progress | Exception | None
"""What is heard of a job; None once it has taken longer than it may."""


@dataclass(frozen=True, eq=False)
class _Ticket:
    """A job with where its outcome goes and how long it may take; a cancelled one is not begun."""

    job: Job
    outbox: queue.SimpleQueue[tuple[_Ticket, _Told]]
    cancelled: threading.Event
    deadline_s: float | None
    patience_s: float
    """How long after the deadline its worker may still be at it, before the worker is ended."""

    def tell(self, what: _Told) -> None:
        self.outbox.put((self, what))


class WorkerPool:
    """Keeps `size` worker processes at work, and starts a new one whenever one dies. A context manager.

    Args:
        module: the worker's module, run with `python -m`.
        args: its command-line arguments.
        size: how many processes; at least 1.
        env: variables that are added to this process's environment; each worker computes on one thread.
    """

    def __init__(
        self, module: str, args: Sequence[str] = (), size: int = 1, env: Mapping[str, str] | None = None
    ) -> None:
        self._inbox: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        command = [sys.executable, "-m", module, *args]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(env or {})}
        self._workers = [_Worker(command, environment, self._inbox) for _ in range(size)]
        self._patience_s = 0.0

    def map(
        self,
        jobs: Iterable[Job],
        on_progress: Callable[[Job, dict[str, Any]], None] | None = None,
        deadline_s: float | None = None,
    ) -> Iterator[Result]:
        """Does the jobs, in their order on whichever worker is free, and gives results as they come.

        If the caller stops early, jobs not begun are dropped, and those at work end unheard. A job that takes longer
        than the deadline is `"late"`, and ends unheard; a worker that then does not come back to the others is ended
        and replaced. It has the longest deadline this pool was ever given for that: a slow job ends by itself, and a
        new worker, which loads what it needs in its first job, gets there. As long may a worker take until it is
        ready; after that its job is `"late"`, and the worker is ended and replaced.

        Args:
            jobs: what to do.
            on_progress: is told (job, facts) in the calling thread, between results.
            deadline_s: seconds that each job has from when a ready worker begins with it; None for no deadline.

        Raises:
            FednlError: the worker's module cannot be started.
        """
        outbox: queue.SimpleQueue[tuple[_Ticket, _Told]] = queue.SimpleQueue()
        cancelled = threading.Event()
        self._patience_s = max(self._patience_s, deadline_s or 0.0)
        tickets = [_Ticket(job, outbox, cancelled, deadline_s, self._patience_s) for job in jobs]
        for ticket in tickets:
            self._inbox.put(ticket)
        waiting = set(tickets)
        try:
            while waiting:
                ticket, item = outbox.get()
                if ticket not in waiting:  # it was given up
                    continue
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, _Progress):
                    if on_progress is not None:
                        on_progress(item.job, item.facts)
                    continue
                waiting.remove(ticket)
                yield item or late(ticket.job)
        finally:
            cancelled.set()

    def process_ids(self) -> list[int]:
        """Lists the ids of the worker processes now."""
        return [worker.process_id for worker in self._workers]

    def close(self) -> None:
        """Ends all workers at once, also in the middle of a job."""
        for worker in self._workers:
            worker.stop()
        for _ in self._workers:
            self._inbox.put(None)
        for worker in self._workers:
            worker.thread.join()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """One process, and the thread that hands it jobs and hears its answers."""

    def __init__(
        self, command: list[str], environment: dict[str, str], inbox: queue.SimpleQueue[_Ticket | None]
    ) -> None:
        self._command, self._environment, self._inbox = command, environment, inbox
        self._lock = threading.Lock()
        self._closed = False
        self._is_ready = False
        self._process = self._start()
        self.thread = threading.Thread(target=self._run, name="fednl-worker", daemon=True)
        self.thread.start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        with self._lock:
            self._closed = True
            self._process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C on the terminal reaches only this process, which then ends its workers.
        return subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def _restart(self) -> None:
        self._end()
        with self._lock:
            if not self._closed:
                self._process, self._is_ready = self._start(), False

    def _end(self) -> int:
        process = self._process
        process.kill()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # closing flushes what a dead worker never read
                if stream is not None:
                    stream.close()
        return process.wait()

    def _run(self) -> None:
        while (ticket := self._inbox.get()) is not None:
            if not ticket.cancelled.is_set():
                try:
                    ticket.tell(self._do(ticket))
                except Exception as error:  # the caller of map hears of it, and does not wait for ever
                    self._restart()
                    ticket.tell(error)
        self._end()

    def _do(self, ticket: _Ticket) -> Result | None:
        job, pipes = ticket.job, self._ready_pipes(ticket)
        if pipes is None:
            return None
        stdin, stdout = pipes
        waits_s = (ticket.deadline_s or 0.0, ticket.patience_s)
        with self._watched(ticket, *waits_s), contextlib.suppress(OSError):  # a pipe that breaks is a worker that ended
            write_frame(stdin, {"op": job.op, "job": dict(job.header)}, job.blobs)
            while (frame := read_frame(stdout)) is not None:
                header, blobs = frame
                if header.pop("kind") == "result":
                    return Result(job, header, blobs)
                ticket.tell(_Progress(job, header["facts"]))
        self._restart()
        return Result(job, {"status": "lost", "answer": {}}, [])

    @contextlib.contextmanager
    def _watched(self, ticket: _Ticket, *waits_s: float) -> Iterator[threading.Event]:
        """Gives the ticket up after the first wait, and ends a process that is still at it after all; says if it did.

        Without a deadline nothing is watched.
        """
        done, ended = threading.Event(), threading.Event()

        def watch() -> None:
            for wait_s in waits_s:
                if done.wait(wait_s):
                    return
                ticket.tell(None)
            with self._lock:
                if not done.is_set():
                    ended.set()
                    self._process.kill()

        if ticket.deadline_s is not None:
            threading.Thread(target=watch, name="fednl-deadline", daemon=True).start()
        try:
            yield ended
        finally:
            with self._lock:  # so that the process is not ended at its next job
                done.set()

    def _ready_pipes(self, ticket: _Ticket) -> tuple[IO[bytes], IO[bytes]] | None:
        """Waits until the worker serves; None for one that does not get there, which is ended and started anew.

        One that ends by itself is started once more, then given up.
        """
        for _ in range(_STARTS):
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            if self._is_ready:
                return stdin, stdout
            with self._watched(ticket, ticket.patience_s) as ended:
                self._is_ready = not self._closed and skip_to_mark(stdout)
            if self._is_ready and not ended.is_set():
                return stdin, stdout
            self._restart()
            if ended.is_set():
                return None
        raise FednlError(f"A worker ({' '.join(self._command[1:3])}) ended before it was ready; see its words above.")
