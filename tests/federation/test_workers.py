"""The same rounds in worker processes: the same bits, however many there are and whatever befalls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from federation_toys import SIZES, Bench, start_params

from fednl.errors import FednlError
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.params import ClientState, Params, equal
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import Transport
from fednl.federation.workers import InlinePool, Pool, ProcessTransport, WorkerPool, train_handler

HERE = str(Path(__file__).parent)
ENV = {"PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])}
TRAINING = TrainingSettings(rounds=3, local_steps=3, batch=4)
SETTINGS = FederationSettings(clients_per_round=3, max_failed_rounds=1)


def pool_of(size: int, **facts: Any) -> WorkerPool:
    facts |= {"training": TRAINING.model_dump(mode="json", by_alias=True), "shared": "memory"}
    return WorkerPool("federation_toy_worker", [json.dumps(facts)], size, ENV)


def bench(path: Path, **fields: Any) -> Bench:
    return Bench(path, algorithm=FedAvg(shared="memory"), settings=SETTINGS, training=TRAINING, **fields)


def tensors_of(transport: Transport) -> ClientState:
    return {f"{client}/{n}": t for client, state in transport.states().items() for n, t in state.items()}


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Params, ClientState]:
    toy = bench(tmp_path_factory.mktemp("in process"))
    transport = toy.transport()
    return toy.run(transport), tensors_of(transport)


@pytest.fixture(scope="module")
def two_workers() -> Iterator[WorkerPool]:
    with pool_of(2) as pool:
        yield pool


def check_same(tmp_path: Path, pool: Pool, expected: tuple[Params, ClientState]) -> Bench:
    toy = bench(tmp_path / "run")
    transport = ProcessTransport(pool, SIZES)
    assert equal(toy.run(transport), expected[0])
    assert equal(tensors_of(transport), expected[1])
    return toy


def test_two_workers_give_the_bits_of_this_process(
    tmp_path: Path, two_workers: WorkerPool, in_process: tuple[Params, ClientState]
) -> None:
    toy = check_same(tmp_path, two_workers, in_process)
    steps = [event for event in toy.events if event["event"] == "step"]
    assert len(steps) == 3 * 3 * 3
    assert sorted(event["done"] for event in steps)[-1] == 27
    for row in toy.rows():
        assert all(client["up_bytes"] > 0 and client["down_bytes"] > 0 for client in row["clients"])


def test_c30_two_hundred_clients_on_one_machine_take_part_through_two_processes(tmp_path: Path) -> None:
    """A client is a job and no connection, so none is turned away."""
    sizes = {f"client-{number:03}": 1 + number % 3 for number in range(200)}
    toy = Bench(tmp_path / "run", sizes=sizes, algorithm=FedAvg(shared="memory"))
    toy.training = TRAINING.model_copy(update={"rounds": 1, "local_steps": 1})
    with pool_of(2, sizes=sizes) as pool:
        toy.run(ProcessTransport(pool, sizes))
    (row,) = toy.rows()
    assert [client["name"] for client in row["clients"]] == sorted(sizes)
    assert {client["status"] for client in row["clients"]} == {"ok"} and row["updated"]


def test_and_the_same_handlers_in_this_process(tmp_path: Path, in_process: tuple[Params, ClientState]) -> None:
    toy = bench(tmp_path)
    check_same(tmp_path, InlinePool({"train": train_handler(toy.endpoint())}), in_process)


def test_a_run_may_change_its_number_of_workers_when_it_resumes(
    tmp_path: Path, two_workers: WorkerPool, in_process: tuple[Params, ClientState]
) -> None:
    toy = bench(tmp_path / "run")
    toy.run(stop_after=1)
    toy.run(ProcessTransport(two_workers, SIZES), stop_after=2)
    assert equal(toy.run(), in_process[0])


def test_a_client_whose_worker_is_killed_is_lost_and_the_round_goes_on(
    tmp_path: Path, in_process: tuple[Params, ClientState]
) -> None:
    toy = bench(tmp_path / "run")
    toy.settings = FederationSettings(quorum=3, keep_checkpoints=3)
    with pool_of(1, kill=str(tmp_path / "killed")) as pool:
        params = toy.run(ProcessTransport(pool, SIZES))
        # The one worker that took its place gives the bits of this process.
        check_same(tmp_path / "again", pool, in_process)
    rows = toy.rows()
    assert [client["status"] for client in rows[0]["clients"]] == ["ok", "ok", "lost", "ok"]
    assert "up_bytes" not in rows[0]["clients"][2]
    assert [client["status"] for client in rows[1]["clients"]] == ["ok"] * 4
    assert all(row["updated"] for row in rows)
    without = bench(tmp_path / "plain")
    without.settings = toy.settings
    first = iter([True, False, False])
    expected = without.run(
        without.transport(lambda replies: [r for r in replies if r.client != "cyd"] if next(first) else replies),
        stop_after=1,
    )
    assert equal(toy_round_one(toy), expected)
    assert not equal(params, start_params())


def toy_round_one(toy: Bench) -> Params:
    """The rules after the first round of a run whose first checkpoint is still there."""
    from fednl.federation.checkpoint import read_tensors

    names = sorted(path.name for path in (toy.path / "checkpoints").iterdir())
    assert names == ["round-1", "round-2", "round-3"]
    return read_tensors(toy.path / "checkpoints" / "round-1" / "params.safetensors")[0]


def test_facts_ride_along_in_every_job() -> None:
    seen: list[dict[str, Any]] = []
    toy = bench(Path("unused"))
    inner = train_handler(toy.endpoint())

    def handle(job: dict[str, Any], blobs: list[bytes], tell: Any) -> Any:
        seen.append(job)
        return inner(job, blobs, tell)

    from fednl.federation.message import Message

    transport = ProcessTransport(InlinePool({"train": handle}), SIZES, {"arm": "federated"})
    shared = {name: t for name, t in start_params().items() if "projection" not in name}
    transport.send("ada", Message(shared, round=1, client="ada"))
    replies = list(transport.replies(None))
    assert seen == [{"arm": "federated", "client": "ada"}]
    # Without its private rules the client cannot compute a loss; it fails, and nothing else does.
    assert [(reply.status, reply.reason) for reply in replies] == [("failed", "KeyError")]


def test_workers_that_cannot_start_stop_the_run(tmp_path: Path) -> None:
    with (
        WorkerPool("no_such_module_of_ours", size=1) as pool,
        pytest.raises(FednlError, match="before it was"),
    ):
        bench(tmp_path / "run").run(ProcessTransport(pool, SIZES))


def test_a_process_killed_in_the_middle_of_a_round_resumes_to_the_bit(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys, torch; torch.set_num_threads(1)\n"
        "from test_workers import bench\n"
        "def kill(event):\n"
        "    if event['event'] == 'step' and event['round'] == 2 and event['done'] == 14:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "from fednl.federation.transport import InProcessTransport\n"
        "toy = bench(pathlib.Path(sys.argv[1]))\n"
        "toy.run(InProcessTransport(toy.endpoint(), toy.sizes), on_event=kill)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    assert subprocess.run(command, env={**os.environ, **ENV}, timeout=100).returncode == -9
    toy, plain = bench(tmp_path / "run"), bench(tmp_path / "plain")
    assert len(toy.rows()) == 1
    second, other = toy.transport(), plain.transport()
    assert equal(toy.run(second), plain.run(other))
    assert equal(tensors_of(second), tensors_of(other))
