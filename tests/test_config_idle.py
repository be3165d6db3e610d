"""Settings that nothing would read are refused; those of an arm, a table or a default are not."""

from __future__ import annotations

from typing import Any

import pytest

from fednl.config import Config
from fednl.errors import SettingsError

LOCAL_ONLY = {"federation": {"algorithm": "local-only"}}
UNIFORM = {"combine": {"weights": "uniform"}}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"privacy": {"epsilon": 1.0}},
            '[privacy] epsilon = 1.0, but mode = "none" adds no noise: leave epsilon out, or set mode',
        ),
        ({"privacy": {"clip": 2.0}}, "[privacy] clip = 2.0, but"),
        ({"privacy": {"noise-multiplier": 3.0, "secure": True}, **UNIFORM}, "[privacy] noise-multiplier = 3.0, but"),
        ({"privacy": {"mode": "central", "clip-quantile": 0.9}, **UNIFORM}, "or set adaptive-clip = true"),
        ({"privacy": {"secure-range": 2.0}}, "[privacy] secure-range = 2.0, but secure = false masks nothing"),
        ({"federation": {"warm-up-s": 60.0}}, "[federation] warm-up-s = 60.0, but deadline-s = 0 waits for as long"),
        ({"federation": {"quarantine-after": 0, "quarantine-rounds": 3}}, "quarantine-after = 0 leaves no client out"),
        ({"combine": {"attackers": 3}}, '[combine] attackers = 3, but rule = "mean" withstands none'),
        ({"combine": {"max-examples": 3, "weights": "uniform"}}, "[combine] max-examples = 3, but"),
        ({"combine": {"max-examples": 3, "rule": "median"}}, 'rule = "median" with weights = "examples" counts every'),
        ({"traffic": {"error-feedback": False}}, '[traffic] error-feedback = false, but up = "float32"'),
        (
            {"privacy": {"mode": "central"}, **UNIFORM, **LOCAL_ONLY},
            '[privacy] mode = "central", but algorithm = "local-only"',
        ),
        ({"privacy": {"min-examples": 9}, **LOCAL_ONLY}, "lets nothing leave a client: leave min-examples out"),
        ({"combine": {"rule": "median"}, **LOCAL_ONLY}, '[combine] rule = "median", but algorithm = "local-only"'),
        ({"data": {"imbalance": 100.0, "clients": 1}}, "[data] imbalance = 100, but the one client of clients = 1"),
    ],
)
def test_what_would_do_nothing_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Config.from_dict(table, "mine.toml").check_training("mine.toml")
    assert str(caught.value).startswith("mine.toml: [") and words in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        {"privacy": {"mode": "central", "epsilon": 1.0, "clip": 2.0}, **UNIFORM},
        {"privacy": {"epsilon": 0.0, "clip": 1.0}, "combine": {"attackers": 1}, "federation": {"warm-up-s": 0.0}},
        {"federation": {"deadline-s": 9.0, "warm-up-s": 60.0}},
        {"combine": {"rule": "median", "attackers": 2}},
        {**UNIFORM, **LOCAL_ONLY},  # what another algorithm's settings leave behind, and promises nothing
        *(
            {**LOCAL_ONLY, "evaluation": {"arms": ["federated", "federated-lora"]}, **acts}
            for acts in (
                {"privacy": {"mode": "central", "min-examples": 2}, **UNIFORM},
                {"combine": {"rule": "median"}},
                {"combine": {"norm-cap": 1.0, "max-examples": 3}},
            )
        ),
        {"privacy": {"mode": "central"}, **UNIFORM, "evaluation": {"arms": ["federated", "local-only"]}},
        {"data": {"imbalance": 100.0, "clients": 1, "dirichlet-alpha": 0.5}},
        {"data": {"imbalance": 100.0, "clients": 1}, "tasks": {"order": ["passkey"]}, "training": {"rounds": 1}},
        {"data": {"imbalance": 9.0, "clients": 1, "task": "classification"}, "evaluation": {"arms": ["federated"]}},
    ],
)
def test_what_acts_or_stands_at_its_default_is_not(table: dict[str, Any]) -> None:
    assert Config.from_dict(table).with_overrides([]) == Config.from_dict(table)
