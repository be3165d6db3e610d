from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fednl.errors import DataError, FednlError
from fednl.federation.inline import InlinePool
from fednl.federation.pool import Job, WorkerPool

ENV = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}


def pool_of(size: int, *args: str) -> WorkerPool:
    return WorkerPool("federation_plain_worker", args, size, ENV)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with pool_of(2) as made:
        yield made


def wait_until_gone(pid: int) -> None:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


def test_jobs_come_back_with_their_blobs_whatever_the_worker_prints(pool: WorkerPool) -> None:
    jobs = [Job("echo", {"number": number}, (bytes([number]) * 5 + b"end", b"")) for number in range(8)]
    results = list(pool.map(jobs))
    assert {result.job for result in results} == set(jobs)
    for job, header, blobs in results:
        assert header["status"] == "ok"
        assert header["answer"]["number"] == job.header["number"]
        assert blobs == [blob[::-1] for blob in job.blobs]


def test_large_blobs_do_not_block(pool: WorkerPool) -> None:
    blob = os.urandom(3_000_000)
    jobs = [Job("echo", {}, (blob, blob)) for _ in range(4)]
    assert all(result.blobs == [blob[::-1]] * 2 for result in pool.map(jobs))


def test_progress_reaches_the_caller_in_its_own_thread(pool: WorkerPool) -> None:
    seen: list[tuple[Job, int, threading.Thread]] = []
    job = Job("echo", {"steps": 3})
    list(pool.map([job], lambda job, facts: seen.append((job, facts["step"], threading.current_thread()))))
    assert seen == [(job, step, threading.main_thread()) for step in range(3)]


def test_an_exception_travels_as_type_and_place_without_its_words(pool: WorkerPool) -> None:
    ((_, header, blobs),) = pool.map([Job("private")])
    assert header["status"] == "failed"
    assert blobs == []
    assert header["answer"]["type"] == "ValueError"
    assert header["answer"]["where"].startswith("federation_plain_worker.py:")
    assert "Ada" not in str(header)


def test_the_words_of_our_own_errors_travel(pool: WorkerPool) -> None:
    ((_, header, _),) = pool.map([Job("known")])
    assert header["answer"]["type"] == "DataError"
    assert header["answer"]["message"] == "the file is empty."


@pytest.mark.parametrize("op", ["odd", "no such operation"])
def test_an_answer_that_cannot_travel_fails_alone(pool: WorkerPool, op: str) -> None:
    first, second = sorted(pool.map([Job(op), Job("echo")]), key=lambda result: result.job.op == "echo")
    assert first.header["status"] == "failed"
    assert second.header["status"] == "ok"


def test_a_job_that_cannot_be_sent_raises_where_it_was_given(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="serializable"):
        list(pool.map([Job("echo", {"odd": object()})]))
    assert next(pool.map([Job("echo")])).header["status"] == "ok"


def test_a_worker_that_dies_loses_its_job_alone_and_is_replaced(pool: WorkerPool) -> None:
    before = pool.process_ids()
    results = list(pool.map([Job("echo"), Job("kill"), Job("echo"), Job("kill"), Job("echo")]))
    assert sorted((result.job.op, result.header["status"]) for result in results) == [
        ("echo", "ok"),
        ("echo", "ok"),
        ("echo", "ok"),
        ("kill", "lost"),
        ("kill", "lost"),
    ]
    assert pool.process_ids() != before
    assert {result.header["status"] for result in pool.map([Job("echo")] * 4)} == {"ok"}


def test_a_worker_killed_from_outside_is_lost(pool: WorkerPool) -> None:
    def kill(job: Job, facts: dict[str, Any]) -> None:
        os.kill(facts["pid"], signal.SIGKILL)

    ((_, header, _),) = pool.map([Job("sleep", {"seconds_s": 60})], kill)
    assert header["status"] == "lost"


def test_a_late_job_ends_by_itself_unheard_and_the_next_jobs_are_done(pool: WorkerPool) -> None:
    list(pool.map([Job("echo")] * 2, deadline_s=60.0))
    before = pool.process_ids()
    late = list(pool.map([Job("sleep", {"seconds_s": 0.3}) for _ in range(2)], deadline_s=0.1))
    assert [result.header["status"] for result in late] == ["late"] * 2
    assert [result.header["status"] for result in pool.map([Job("echo")] * 2, deadline_s=60.0)] == ["ok"] * 2
    assert pool.process_ids() == before


def test_a_worker_that_hangs_is_given_up_at_the_deadline_then_ended_and_the_other_jobs_are_done() -> None:
    with pool_of(1) as made:
        list(made.map([Job("echo")]))
        before, hung, others = made.process_ids(), Job("sleep", {"seconds_s": 600}), [Job("echo"), Job("echo")]
        assert [result.header["status"] for result in made.map([hung], deadline_s=0.1)] == ["late"]
        found = [(result.job, result.header["status"]) for result in made.map([hung, *others], deadline_s=1.0)]
        assert found == [(hung, "late"), *((other, "ok") for other in others)]
        assert made.process_ids() != before


def test_a_worker_that_never_gets_ready_is_given_up_at_the_deadline_and_the_next_one_works(tmp_path: Path) -> None:
    with pool_of(1, "stuck", str(tmp_path / "mark")) as made:
        began_s, jobs = time.monotonic(), [Job("echo", {"number": number}) for number in range(2)]
        found = {result.job: result.header["status"] for result in made.map(jobs, deadline_s=0.7)}
        assert found[jobs[0]] == "late" and time.monotonic() - began_s < 3
        assert [result.header["status"] for result in made.map(jobs, deadline_s=60.0)] == ["ok"] * 2


def test_closing_ends_workers_in_the_middle_of_a_job() -> None:
    made = pool_of(1)
    pids: list[int] = []

    def stop(job: Job, facts: dict[str, Any]) -> None:
        pids.append(facts["pid"])
        made.close()

    assert [result.header["status"] for result in made.map([Job("sleep", {"seconds_s": 60})], stop)] == ["lost"]
    wait_until_gone(pids[0])
    made.close()


def test_a_worker_outlives_no_parent_pipe() -> None:
    with pool_of(1) as made:
        ((_, header, _),) = made.map([Job("echo")])
        worker = made._workers[0]._process
        assert worker.stdin is not None
        worker.stdin.close()
        assert worker.wait(timeout=10) == 0
        assert header["answer"]["pid"] == worker.pid


def test_workers_end_with_a_killed_parent_also_in_the_middle_of_a_job() -> None:
    code = (
        "import sys; from fednl.federation.pool import Job, WorkerPool\n"
        "tell = lambda job, facts: print(facts['pid'], flush=True)\n"
        "jobs = [Job('sleep', {'seconds_s': 60})] * 2\n"
        "list(WorkerPool('federation_plain_worker', size=2).map(jobs, tell))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **ENV}, **pipes) as parent:
        assert parent.stdout is not None
        assert all(int(parent.stdout.readline()) for _ in range(2))
        parent.kill()
        # The workers hold the other end of this pipe: it is at its end once the last of them is gone.
        _, told = parent.communicate(timeout=20)
    assert "Traceback" not in told


def test_a_module_that_cannot_start_is_said_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pool_of(2, "broken") as made, pytest.raises(FednlError, match="federation_plain_worker"):
        list(made.map([Job("echo")]))
    with (
        WorkerPool("no_such_module_of_ours", size=1) as made,
        pytest.raises(FednlError, match="no_such_module"),
    ):
        list(made.map([Job("echo")]))
    assert "No module named no_such_module_of_ours" in capfd.readouterr().err


def test_the_inline_pool_answers_as_a_worker_would() -> None:
    def echo(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
        tell({"step": 1})
        return {"number": job["number"]}, [blob[::-1] for blob in blobs]

    def fail(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
        raise DataError("the file is empty.") if job else ValueError("private words")

    seen: list[dict[str, Any]] = []
    inline = InlinePool({"echo": echo, "fail": fail})
    jobs = [Job("echo", {"number": 3}, (b"abc",)), Job("fail"), Job("fail", {"ours": True}), Job("none")]
    results = list(inline.map(jobs, lambda job, facts: seen.append(facts)))
    assert [result.header["status"] for result in results] == ["ok", "failed", "failed", "failed"]
    assert (results[0].header["answer"], results[0].blobs) == ({"number": 3}, [b"cba"])
    assert "private" not in str(results[1].header)
    assert results[2].header["answer"]["message"] == "the file is empty."
    assert seen == [{"step": 1}]
    inline.close()


def test_the_inline_pool_keeps_its_deadline() -> None:
    def sleep(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
        time.sleep(job["seconds_s"])
        return {}, ()

    jobs = [Job("sleep", {"seconds_s": seconds_s}) for seconds_s in (0.0, 0.3, 0.0)]
    found = [result.header["status"] for result in InlinePool({"sleep": sleep}).map(jobs, deadline_s=0.2)]
    assert found == ["ok", "late", "ok"]
