"""Labelled texts that cannot be used, from the command line: the exit code, one sentence, and no run left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednl import cli
from small_run import tiny_backbone
from test_classification_run import classification


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone") / "tiny")


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        ({'template = "Text: {text}': "template = 'Text:'\n# "}, 2, "[classification] template = "),
        ({"tokens = 40": "tokens = 4000000"}, 2, "more than the model's context"),
        ({"labels = []": 'labels = ["sun", "rain", "snow"]'}, 1, 'has 0 texts of the class "snow"'),
        ({"labels = []": 'labels = ["sun"]'}, 2, "name at least two classes"),
        ({"train = 8": "train = 0", "least = 2": "least = 0"}, 1, "None of the 3 clients has a training example"),
        (
            {
                "train = 8": "train = 1",
                "least = 2": "least = 0",
                "clients = 3": "clients = 1",
            },
            1,
            "no client gets a training text of class",
        ),
        ({"tokens = 40": "tokens = 9"}, 1, "its prompt has"),
        ({"rows.jsonl": "none.jsonl"}, 2, "which is not a file"),
        ({"rows.jsonl": "few.jsonl"}, 1, "has 1 texts of class 2 of 3 (sorted), and it takes 3"),
        ({'adapters = ["context-vectors"]': 'adapters = ["memory"]'}, 2, '"ifed-icl" does not go with adapters'),
    ],
)
def test_exit_codes(
    backbone: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    lines: dict[str, str],
    code: int,
    says: str,
) -> None:
    text = classification(backbone, evaluation={"arms": ["federated"]}).to_toml()
    few = (backbone / "rows.jsonl").read_text(encoding="utf-8") + '{"text": "SECRET", "label": "snow"}\n'
    (backbone / "few.jsonl").write_text(few, encoding="utf-8")
    for old, new in lines.items():
        assert old in text, text
        text = text.replace(old, new)
    file, out = tmp_path / "mine.toml", tmp_path / "run"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        cli.main(["train", str(file), "--out", str(out)])
    told: Any = capfd.readouterr()
    assert int(left.value.code or 0) == code and told.out == ""
    assert says in " ".join(told.err.split())
    assert "Traceback" not in told.err and "SECRET" not in told.err
    assert not out.exists()
