"""The [data] section."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from fednl.data.settings import DataSettings


def test_kebab_case_keys_and_a_list_of_names() -> None:
    section = DataSettings.model_validate({"hold-out-clients": ["passkey"], "tokens": 192})
    assert section.hold_out_clients == ("passkey",)
    assert section.tokens == 192
    dumped = json.loads(section.model_dump_json(by_alias=True))
    assert dumped["hold-out-clients"] == ["passkey"]
    assert DataSettings.model_validate(dumped) == section


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": 1},
        {"tokens": "320"},
        {"tokens": 0},
        {"events": 0},
        {"events": 33},
        {"train": -1},
        {"clients": 0},
        {"hold-out-clients": "passkey"},
        {"filler": ""},
    ],
)
def test_wrong_keys_and_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DataSettings.model_validate(wrong)


def test_settings_and_examples_need_no_torch() -> None:
    code = (
        "import sys, fednl.data.settings, fednl.data.needles, fednl.data.partition; "
        "from fednl.data import TASKS, task; assert task('needles') is TASKS['needles']; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
