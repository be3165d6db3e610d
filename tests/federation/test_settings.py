from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from fednl.federation.settings import FederationSettings, TrainingSettings


def test_defaults_and_kebab_case() -> None:
    assert TrainingSettings().rounds == 4
    made = TrainingSettings.model_validate({"local-steps": 2, "local-lr": 1})
    assert (made.local_steps, made.local_lr) == (2, 1.0)
    assert FederationSettings.model_validate({"shared": ["write", "layers.1.*"]}).shared == (
        "write",
        "layers.1.*",
    )
    assert FederationSettings.model_validate_json('{"shared": ["write"]}').shared == ("write",)


@pytest.mark.parametrize(
    "keys",
    [
        {"rounds": 0},
        {"rounds": 2.0},
        {"rounds": True},
        {"local-lr": 0},
        {"local-lr": float("nan")},
        {"clip": float("inf")},
        {"schedule": "linear"},
        {"optimizer-state": "drop"},
        {"warmup-steps": 8, "rounds": 2, "local-steps": 4},
        {"steps": 3},
    ],
)
def test_training_refuses(keys: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TrainingSettings.model_validate(keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"quorum": 0},
        {"quorum": 3, "clients-per-round": 2},
        {"shared": ""},
        {"shared": []},
        {"shared": ["write", ""]},
        {"shared": [1]},
        {"deadline-s": -1},
        {"keep-checkpoints": 0},
        {"max-failed-rounds": 0},
        {"algorithm": ""},
    ],
)
def test_federation_refuses(keys: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FederationSettings.model_validate(keys)


def test_what_a_settings_file_needs_imports_no_torch() -> None:
    code = (
        "import sys, fednl.federation, fednl.federation.settings as s, fednl.federation.pool;"
        "from fednl.federation.algorithms import ALGORITHMS, PRESETS;"
        "[kind.Settings() for kind in ALGORITHMS.values()];"
        "assert set(PRESETS['fednl']['federation']) == {'adapters', 'algorithm', 'shared'};"
        "assert s.FederationSettings().algorithm in ALGORITHMS;"
        "sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
