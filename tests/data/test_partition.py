"""Who holds what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fednl.data import task
from fednl.data.examples import Splits
from fednl.data.partition import partition_rows
from fednl.errors import SettingsError


def test_every_split_of_every_client_is_listed(clients: dict[str, Splits]) -> None:
    rows = partition_rows({**clients, "nobody": Splits([], [], [])})
    assert [(row.client, row.split) for row in rows] == [
        (name, split) for name in [*clients, "nobody"] for split in ("train", "validation", "test")
    ]
    assert [row.n for row in rows][:3] == [40, 4, 4]
    assert rows[0].tokens == 40 * 700
    assert [(row.n, row.tokens) for row in rows[-3:]] == [(0, 0)] * 3
    filled = [row.sha256 for row in rows[:-3]]
    assert len(set(filled)) == len(filled)
    assert all(len(row.sha256) == 64 for row in rows)


def test_the_hash_sees_every_token_and_the_answer(clients: dict[str, Splits]) -> None:
    first = clients["passkey"].train[0]

    def digest(**changes: object) -> str:
        return partition_rows({"c": Splits([replace(first, **changes)], [], [])})[0].sha256  # type: ignore[arg-type]

    same = digest()
    assert same == digest()
    assert digest(prompt_ids=(*first.prompt_ids[:-1], 99)) != same
    assert digest(gold=(first.gold + 1) % 4) != same
    assert digest(candidate_ids=first.candidate_ids[::-1]) != same
    assert digest(removed_ids=first.prompt_ids) != same


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(SettingsError, match=r'data\.task is "needle"; it must be one of: needles'):
        task("needle")
