"""The ablation at the tiny scale: each line is its own configuration of one run, and the paper's words are apart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fednl.evaluation.outcomes import Outcome
from fednl.federation.checkpoint import read_tensors
from fednl.reproduce import ablation, table_named
from fednl.reproduce.sitting import Sitting


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ablation")
    Sitting(table_named("ablation"), "tiny", out).whole()
    return out


def test_each_line_leaves_out_what_it_says(folder: Path) -> None:
    def rules(name: str) -> dict[str, list[float]]:
        params, _ = read_tensors(folder / name / "final" / "params.safetensors")
        return {name: tensor.flatten().tolist() for name, tensor in params.items()}

    config = {name: json.loads((folder / name / "config.json").read_text()) for name in ("full", "hebbian")}
    assert [config[name]["memory"]["rule"] for name in config] == ["delta", "hebbian"]
    assert config["full"] | {"memory": 0, "format": 1} == config["hebbian"] | {"memory": 0, "format": 1}
    assert not [name for name in rules("no-projection") if ".projection." in name]
    gates = {name: {k: v for k, v in rules(name).items() if ".gate." in k} for name in ("full", "no-gate")}
    assert gates["no-gate"].keys() == gates["full"].keys() and gates["full"]
    for name, numbers in gates["no-gate"].items():
        start = 0.1 if name.endswith("bias") else 0.0
        assert numbers == pytest.approx([start] * len(numbers)) and gates["full"][name] != numbers
    # The weights of fresh rules are 0; those that are not left out were trained beside the gate that was not.
    assert any(any(v) for k, v in rules("no-gate").items() if k.endswith("write.weight"))


def test_perplexities_stand_beside_the_papers_and_are_of_the_same_stretches(folder: Path) -> None:
    rows = json.loads((folder / "results" / "ablation.json").read_text())["rows"]
    macro = {row["method"]: row for row in rows if row["client"] == "macro" and "baseline" not in row}
    assert list(macro) == [line.name for line in ablation.LINES]
    assert {row["n"] for row in macro.values()} == {2}
    text = (folder / "report.md").read_text()
    full = next(line for line in text.splitlines() if line.startswith("| full "))
    assert f" {math.exp(macro['full']['value']):.2f} |" in full and "FedNL: 29.82" in full  # two have no interval
    told = macro["full"] | {"value": 1.0, "low": 0.5, "high": 2.0}
    assert ablation.perplexities([told]) == {"full": "2.72 [1.65, 7.39]"}
    gaps = {row["baseline"]: row["value"] for row in rows if row["metric"] == "difference"}
    frozen = macro["full"]["value"] - macro["rules frozen"]["value"]
    assert gaps["rules frozen"] == pytest.approx(frozen, abs=1e-9)
    assert len(gaps) == len(ablation.LINES) - 1


def test_a_line_that_read_other_text_is_not_compared(tmp_path: Path) -> None:
    def read(nats: float, text: str) -> list[Outcome]:
        return [
            Outcome("ada", at, 0, 0, True, True, nats * (1 + 0.01 * at), 1.0, 3, question=f"{text} {at}")
            for at in range(6)
        ]

    names = [line.name for line in ablation.LINES]
    answers = {
        names[0]: read(1.0, "a"),
        names[1]: read(2.0, "a"),
        names[2]: read(3.0, "b"),
        names[3]: read(3.0, "a")[:4],
    }
    page = ablation.written(Sitting(table_named("ablation"), "tiny", tmp_path), answers)
    rows = page.measured["ablation"]
    told = {row["baseline"]: row["verdict"] for row in rows if row["metric"] == "difference"}
    other = "asked other prompts, does not count"
    assert told == {names[1]: "better", names[2]: other, names[3]: other}
    assert {row["method"] for row in rows if "note" in row and "baseline" not in row} == set(names[2:4])
    lines = [line for line in page.text.splitlines() if line.startswith(f"| {names[2]}")]
    assert len(lines) == 2 and all("(asked other prompts)" in line for line in lines)
