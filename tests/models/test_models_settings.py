from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from fednl.models.settings import BackboneSettings, LoraSettings


def test_settings_and_packaged_names_need_no_torch() -> None:
    code = "import sys, fednl.models.settings, fednl.models.packaged; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_defaults() -> None:
    assert BackboneSettings().model_dump() == {"id": "smollm2-135m", "device": "auto", "dtype": "float32"}
    lora = LoraSettings()
    assert (lora.rank, lora.alpha, lora.targets, lora.local_lr) == (0, None, "all-linear", None)
    assert LoraSettings(rank=8).scale_alpha == 16.0
    assert LoraSettings(rank=8, alpha=8.0).scale_alpha == 8.0
    assert LoraSettings(targets="q_proj, v_proj").targets == "q_proj,v_proj"


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (BackboneSettings, {"device": "gpu"}),
        (BackboneSettings, {"device": "cuda:x"}),
        (BackboneSettings, {"dtype": "float16"}),
        (BackboneSettings, {"id": ""}),
        (BackboneSettings, {"name": "smollm2-135m"}),
        (LoraSettings, {"rank": -1}),
        (LoraSettings, {"rank": "8"}),
        (LoraSettings, {"rank": 8.0}),
        (LoraSettings, {"rank": 8, "alpha": 0.0}),
        (LoraSettings, {"rank": 8, "alpha": float("nan")}),
        (LoraSettings, {"rank": 8, "local_lr": 0.0}),
        (LoraSettings, {"targets": ""}),
        (LoraSettings, {"targets": "q_proj,"}),
        (LoraSettings, {"targets": "q_proj,q_proj"}),
        (LoraSettings, {"targets": "all-linear,q_proj"}),
        (LoraSettings, {"targets": ".*"}),
        (LoraSettings, {"dropout": 0.1}),
    ],
)
def test_what_no_run_should_start_with_is_refused(section: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        section(**values)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        BackboneSettings().device = "cpu"
