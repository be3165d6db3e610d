from __future__ import annotations

from typing import Any

import pytest

from fednl.config import Config
from fednl.report.exchange import exchange_lines, exchange_notes


def lines(**sections: dict[str, Any]) -> list[str]:
    return exchange_lines(Config.from_dict(sections).to_dict())


def test_plain_averages_need_no_words() -> None:
    assert lines() == []
    assert exchange_lines({}) == []
    assert exchange_notes("federated", [{"round": 1, "clients": [{"name": "a", "up_bytes": 3}]}]) == []


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"traffic": {"up": "int8", "content": "deltas"}}, "Traffic: int8 deltas up, float32 down"),
        ({"combine": {"weights": "uniform", "norm-cap": 0.5}}, "Combined by: weights uniform, norm-cap 0.5"),
        ({"combine": {"rule": "median", "attackers": 2}}, "Combined by: median against 2 attackers"),
        (
            {"federation": {"algorithm": "fedweit"}},
            "Passed on: fedweit hands what a client learned of a task to every other client, as it is",
        ),
        ({"privacy": {"min-examples": 9}}, "Privacy: clients with fewer than 9 examples share nothing"),
    ],
)
def test_what_differs_is_said(sections: dict[str, Any], words: str) -> None:
    assert lines(**sections) == [words]


def test_noise_is_named_with_all_that_its_figure_depends_on() -> None:
    privacy = {"mode": "central", "noise-multiplier": 1.5, "clip": 0.1, "secure": True, "noise-seed": 3}
    told = lines(privacy=privacy, combine={"weights": "uniform"})[-1]
    for words in ("central noise of 1.5 clips", "clip 0.1", "delta 1e-05", "not covered", "simulation", "masked sums"):
        assert words in told


def test_rounds_tell_container_bytes_caps_and_epsilon() -> None:
    client = {"up_bytes": 200, "up_container_bytes": 50, "down_bytes": 400, "down_container_bytes": 40}
    rounds = [
        {"metrics": {"epsilon": epsilon, "capped_clients": 2.0}, "clients": [client, {"down_bytes": 9}]}
        for epsilon in (0.5, 1.25)
    ]
    assert exchange_notes("federated", rounds) == [
        "Names, shapes and headers, federated: 25.0% of the bytes up and 10.0% of the bytes down.",
        "Changes shortened to the norm cap, federated: 4 in 2 rounds.",
        "Epsilon, federated: 0.5 after the first of these rounds, 1.25 after the last.",
    ]
