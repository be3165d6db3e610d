"""The harness on a run: what is passed on, what is refused, and that a closed memory is the harness's own `hf`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fednl
from fednl import cli
from fednl.errors import SettingsError
from fednl.harness import lm_eval, with_model
from small_run import settings, tiny_backbone

QUESTIONS = [
    {"q": "The old bird", "choices": ["sleeps near the river", "sings over a stone", "walks"], "gold": 0},
    {"q": "A green cloud walks", "choices": ["under the house", "near", "sleeps and sings"], "gold": 2},
]
TASK = """task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with full attention, whose open memory changes the logits."""
    folder = tmp_path_factory.mktemp("harness")
    backbone = tiny_backbone(folder / "backbone")
    config = settings(
        backbone,
        data={"task": "text", "tokens": 64, "clients": 1, "train": 4, "validation": 0, "test": 1},
        text={"sources": [str(backbone / "filler.txt")]},
        memory={"window-tokens": 0},
        training={"rounds": 1, "local-lr": 0.3},
        evaluation={"arms": []},
    )
    return fednl.train(config, folder / "run").path


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A stand-in for the package: what it registers, and the command line it reads."""
    seen: dict[str, Any] = {"models": {}}
    names = ("lm_eval", "lm_eval.__main__", "lm_eval.api", "lm_eval.api.registry", "lm_eval.models")
    modules = {name: ModuleType(name) for name in (*names, "lm_eval.models.huggingface")}

    class HFLM:
        def __init__(self, **given: Any) -> None:
            self.given = given

    def register_model(name: str) -> Any:
        return lambda kind: seen["models"].setdefault(name, kind)

    modules["lm_eval.__main__"].cli_evaluate = lambda: seen.update(argv=list(sys.argv))  # type: ignore[attr-defined]
    modules["lm_eval.api.registry"].register_model = register_model  # type: ignore[attr-defined]
    modules["lm_eval.models.huggingface"].HFLM = HFLM  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: True if name == "lm_eval" else find_spec(name, *more)
    )
    monkeypatch.delitem(sys.modules, "fednl.harness_model", raising=False)
    yield seen
    sys.modules.pop("fednl.harness_model", None)  # it was made of the stand-in


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (["--tasks", "a,b"], True),
        (["run", "--tasks=a", "--model_args", "run=r"], True),
        (["-t", "a"], True),
        (["--tasks", "a", "--model", "hf"], False),
        (["--tasks", "a", "--model=hf"], False),
        (["-M", "hf", "-t", "a"], False),
        (["--config", "mine.yaml", "--tasks", "a"], False),
        (["ls", "tasks"], False),
        (["validate", "--tasks", "a"], False),
        (["run", "--help"], False),
    ],
)
def test_our_model_is_named_where_tasks_run_and_none_is(given: list[str], added: bool) -> None:
    assert with_model(given) == given + ["--model", "fednl"] * added


def test_without_the_package_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *given: None)
    with pytest.raises(SystemExit) as left:
        cli.main(["lm-eval", "--tasks", "a"])
    assert left.value.code == 2
    assert 'pip install "fednl[lm-eval]"' in capfd.readouterr().err


def test_arguments_reach_the_harness_as_they_are(harness: dict[str, Any]) -> None:
    before = list(sys.argv)
    with pytest.raises(SystemExit) as left:
        cli.main(["lm-eval", "--model_args", "run=r,memory=closed", "--tasks", "a", "b", "-b", "4", "--help"])
    assert left.value.code == 0
    given = ["--model_args", "run=r,memory=closed", "--tasks", "a", "b", "-b", "4", "--help"]
    assert harness["argv"] == ["lm-eval", *given, "--model", "fednl"]
    assert sys.argv == before
    assert list(harness["models"]) == ["fednl"]


def test_the_model_is_the_run_with_its_memory_open_or_closed(harness: dict[str, Any], run: Path) -> None:
    lm_eval(["ls", "tasks"])
    kind = harness["models"]["fednl"]
    ids = torch.randint(3, 250, (1, 60), generator=torch.Generator().manual_seed(0))
    opened, shut = (
        kind(run=str(run), memory=how, batch_size=3, device="cpu", max_length=50) for how in ("open", "closed")
    )
    assert opened.given.keys() == {"pretrained", "tokenizer", "batch_size", "max_length"}
    logits = [model.given["pretrained"](ids).logits for model in (opened, shut)]
    own = fednl.load(run)[0]
    torch.testing.assert_close(logits[0], own(ids).logits, rtol=0, atol=0)
    with fednl.closed(own):
        torch.testing.assert_close(logits[1], own(ids).logits, rtol=0, atol=0)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "run=RUN"),
        ({"run": "nowhere"}, "there is no folder nowhere"),
        ({"run": "RUN", "memory": "ajar"}, '"open" or "closed"'),
        ({"run": "RUN", "dtype": "float16"}, "dtype is not known"),
    ],
)
def test_what_the_model_cannot_be_is_refused(harness: dict[str, Any], given: dict[str, str], says: str) -> None:
    lm_eval(["ls", "tasks"])
    with pytest.raises(SettingsError, match=says):
        harness["models"]["fednl"](**given)


def answered(folder: Path, *arguments: str) -> list[list[float]]:
    """Log likelihoods of every choice, from the harness's own file of samples."""
    words = ["lm-eval", *arguments, "--tasks", "tiny", "--include_path", str(folder), "--device", "cpu"]
    out = folder / str(len(list(folder.iterdir())))
    words += ["--output_path", str(out), "--log_samples", "--batch_size", "2"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "fednl", *words], env={**os.environ, **offline}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = out.rglob("samples_tiny_*.jsonl")
    lines = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda line: line["doc_id"])
    return [[float(told[0]) for told in line["filtered_resps"]] for line in lines]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="the extra lm-eval is not installed")
def test_a_closed_memory_answers_as_the_harness_s_own_model(run: Path, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (tmp_path / "tiny.yaml").write_text(TASK.replace("QUESTIONS", str(tmp_path / "questions.jsonl")))
    theirs = answered(tmp_path, "--model", "hf", "--model_args", f"pretrained={run.parent / 'backbone'},dtype=float32")
    shut = answered(tmp_path, "--model_args", f"run={run},memory=closed")
    opened = answered(tmp_path, "--model_args", f"run={run}")
    assert len(theirs) == 2 and [len(row) for row in theirs] == [3, 3]
    for mine, other in zip(shut, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    assert max(abs(a - b) for rows in zip(opened, shut, strict=True) for a, b in zip(*rows, strict=True)) > 1e-3
