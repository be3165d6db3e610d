"""Which task each client is at, when one ends for it, and that the data are those."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednl.data.client_names import numbered_clients
from fednl.data.needles import build, build_stream
from fednl.data.partition import partition_rows
from fednl.data.settings import DataSettings
from fednl.data.stream import Stream, TasksSettings
from fednl.errors import SettingsError

ORDER = ("passkey", "name-date", "multi-key")
SMALL = {"clients": 4, "train": 3, "validation": 1, "test": 2}
Make = Callable[..., DataSettings]


def stream(rotate: bool = False, per_task: int = 2, clients: int = 4) -> Stream:
    settings = TasksSettings(order=ORDER, rounds_per_task=per_task, rotate=rotate)
    return Stream(settings, tuple(numbered_clients(clients)))


def test_all_clients_go_in_one_order_or_each_begins_one_further() -> None:
    assert {stream().tasks_of(client) for client in numbered_clients(4)} == {ORDER}
    turned = [stream(rotate=True).tasks_of(client)[0] for client in numbered_clients(4)]
    assert turned == ["passkey", "name-date", "multi-key", "passkey"]
    assert stream(rotate=True).tasks_of("client-02") == ("name-date", "multi-key", "passkey")
    assert numbered_clients(10)[::9] == ["client-01", "client-10"]
    assert stream().settings.last_rounds == [2, 4, 6]


def test_a_task_lasts_its_rounds_and_the_last_one_for_ever() -> None:
    assert [stream().at("client-01", round) for round in range(1, 9)] == [
        *["passkey"] * 2, *["name-date"] * 2, *["multi-key"] * 4
    ]  # fmt: skip


@given(st.integers(1, 5), st.integers(0, 2**32), st.integers(1, 4))
def test_every_task_ends_once_for_who_was_asked_in_it_and_with_its_last_round(
    per_task: int, seed: int, number: int
) -> None:
    own = stream(per_task=per_task)
    draws = {
        round: set(random.Random(seed + round).sample(own.clients, number)) for round in range(1, 3 * per_task + 1)
    }

    def asked(round: int) -> Collection[str]:
        return draws[round]

    for client in own.clients:
        ended = [own.ends(client, round, asked) for round in draws if client in draws[round]]
        met = [own.at(client, round) for round in draws if client in draws[round]]
        assert [task for task in ended if task] == list(dict.fromkeys(met))


@pytest.mark.parametrize("rotate", [False, True])
def test_clients_hold_their_own_examples_of_every_kind_in_order(settings: Make, tokenizer: Any, rotate: bool) -> None:
    tasks = TasksSettings(order=ORDER, rotate=rotate)
    clients = build_stream(settings(**SMALL), tokenizer, 120, "candidates", 3, tasks)
    assert list(clients) == numbered_clients(4)
    own = Stream(tasks, tuple(clients))
    for client, splits in clients.items():
        for found, each in ((splits.train, 3), (splits.validation, 1), (splits.test, 2)):
            assert [one.task for one in found] == [kind for kind in own.tasks_of(client) for _ in range(each)]
            assert [one.index for one in found] == list(range(3 * each))
            assert {one.client for one in found} == {client}
    hashes = {row.sha256 for row in partition_rows(clients)}
    assert len(hashes) == 3 * len(clients)
    assert partition_rows(clients) == partition_rows(
        build_stream(settings(**SMALL), tokenizer, 120, "candidates", 3, tasks)
    )


def test_without_a_stream_the_examples_name_no_task(settings: Make, tokenizer: Any) -> None:
    clients = build(settings(**SMALL), tokenizer, 120, "candidates", 3)
    assert {one.task for splits in clients.values() for one in splits.test} == {""}


def test_what_cannot_be_a_stream_is_refused(settings: Make, tokenizer: Any) -> None:
    held = settings(**SMALL, hold_out_clients=("passkey",))
    with pytest.raises(SettingsError, match="choose from client-01"):
        build_stream(held, tokenizer, 120, "candidates", 3, TasksSettings(order=ORDER))
