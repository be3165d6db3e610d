"""Who does a run's work: this process or worker processes, and what they say of their backbone and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from fednl.config import Config
from fednl.federation.inline import InlinePool, Pool
from fednl.federation.jobs import answer_of, do
from fednl.federation.pool import Job, WorkerPool
from fednl.files import private_folder
from fednl.runs import Run


@contextmanager
def working(run: Run, config: Config) -> Iterator[Pool]:
    """Gives whoever does the work: this process, or `federation.parallel-clients` worker processes.

    Args:
        run: where workers find their settings.
        config: these settings.

    Raises:
        FednlError: a worker cannot start, or there is no place for what it keeps on disk.
    """
    workers = config.federation.parallel_clients
    if workers == 1:
        from fednl.worker import handlers

        yield InlinePool(handlers(config))
        return
    run.write_json("workers.json", config.to_dict())
    # Workers are killed, and so take away nothing of what they kept on disk.
    with private_folder("fednl-workers-") if config.prefix.cache == "disk" else nullcontext() as folder:
        env = {} if folder is None else dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
        pool = WorkerPool("fednl.worker", [str(run.path / "workers.json")], workers, env)
        try:
            yield pool
        finally:
            pool.close()
            (run.path / "workers.json").unlink(missing_ok=True)


def described(pool: Pool, on_event: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Gives what a client says of its backbone and data.

    Args:
        pool: who does the work.
        on_event: is told what it says meanwhile (a download).
    """

    def tell(job: Job, facts: dict[str, Any]) -> None:
        on_event({"event": "note", "text": facts["note"]})

    return answer_of(do(pool, Job("describe"), tell))
