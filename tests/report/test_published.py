"""Published tables of several seeds, put together: the claims that one table cannot make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fednl.errors import SettingsError
from fednl.evaluation.rows import Row
from fednl.report import report


def table(folder: Path, seed: int, gap: float, **settings: Any) -> Path:
    """What `fednl reproduce` leaves behind, as far as it is read here."""
    row: Row = {"method": "FedNL", "baseline": "FedAvg-LoRA", "client": "macro", "metric": "difference"}
    row |= {"of": "candidates", "value": gap, "n": 105, "low": gap - 0.1, "high": gap + 0.1, "seed": seed}
    place = {"method": "federated", "baseline": "window-only", "metric": "difference", "of": "nats_per_token", "bin": 0}
    facts = {"format": 1, "table": "needles", "scale": "small", "where": "measured here", "command": "fednl reproduce"}
    (folder / "results").mkdir(parents=True)
    (folder / "results/needles-1024.json").write_text(json.dumps({**facts, "rows": [row, place]}))
    for method in ("fednl", "fedavg-lora-window"):
        (folder / method).mkdir()
        config = {"format": 1, "run": {"seed": seed, "out": str(folder)}, "training": settings}
        (folder / method / "config.json").write_text(json.dumps(config))
    (folder / "report.md").write_text(f"# Table of seed {seed}\n")
    return folder


def test_three_seeds_of_a_table_claim_what_two_do_not(tmp_path: Path) -> None:
    folders = [table(tmp_path / f"seed-{seed}", seed, gap) for seed, gap in enumerate([0.30, 0.34, 0.32])]
    text = report(folders)
    assert "# needles at scale small, 3 seeds" in text and "## needles-1024" in text
    line = next(line for line in text.splitlines() if line.startswith("| FedNL minus FedAvg-LoRA"))
    assert "+30.0 (0), +34.0 (1), +32.0 (2)" in line and "+32.0" in line and line.endswith(" better |")
    assert "no claim: fewer than 3 seeds" in report(folders[:2])
    assert report(folders[:1]) == "# Table of seed 0\n"


def test_tables_of_a_model_beside_their_runs_are_put_together(tmp_path: Path) -> None:
    """As at the scale tiny: the backbone, whose `config.json` is its own, and the questions lie in the folder."""
    folders = []
    for seed in range(3):
        folder = table(tmp_path / f"seed-{seed}", seed, 0.3 + seed / 100)
        (folder / "tiny-model").mkdir()
        (folder / "tiny-model/config.json").write_text('{"model_type": "llama"}')
        (folder / "tiny-model/river.txt").write_text("text")
        config = {
            "format": 1,
            "run": {"seed": seed},
            "backbone": {"id": f"{folder.name}/tiny-model", "device": ("cpu", "cuda", "auto")[seed]},
            "text": {"sources": [str(folder / "tiny-model/river.txt"), "bbc-news/tech"]},
            "federation": {"parallel-clients": seed + 1},
            "evaluation": {"batch": seed + 1, "arms": ["federated"][:seed]},
        }
        (folder / "fednl/config.json").write_text(json.dumps(config))
        folders.append(folder)
    assert " better |" in report(folders)
    elsewhere = config | {"backbone": {"id": "/other/model"}}
    (folders[1] / "fednl/config.json").write_text(json.dumps(elsewhere | {"run": {"seed": 1}}))
    with pytest.raises(SettingsError, match="differ in more than their seed"):
        report(folders)


def test_what_does_not_count_keeps_its_note_over_seeds(tmp_path: Path) -> None:
    folders = []
    for seed in range(3):
        folder = table(tmp_path / f"seed-{seed}", seed, 0.3 + seed / 100)
        path = folder / "results/needles-1024.json"
        result = json.loads(path.read_text())
        gap, mark = result["rows"][0], {"note": "asked other prompts"}
        closed = {"method": "FedNL", "metric": "share_closed", "client": "macro", "of": "candidates", "seed": seed}
        closed |= {"floor": "F", "ceiling": "C"}
        shares = [closed | {"value": 0.7 + seed / 100, "n": 105}, closed | {"of": "nats_per_token"} | mark]
        path.write_text(json.dumps(result | {"rows": [gap | mark, *shares]}))
        folders.append(folder)
    lines = [line for line in report(folders).splitlines() if line.startswith("| FedNL")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [one[0] for one in cells] == ["FedNL minus FedAvg-LoRA", *["FedNL: closed of the way from F to C"] * 2]
    assert cells[0][2:] == ["+30.0 (0), +31.0 (1), +32.0 (2)", "-", "asked other prompts, does not count"]
    assert cells[1][2:] == ["70.0 (0), 71.0 (1), 72.0 (2)", "71.0 % [68.5, 73.5]", "-"]
    assert cells[2][2:] == ["-", "-", "asked other prompts, does not count"]


def test_tables_of_streams_are_put_together_bin_by_bin(tmp_path: Path) -> None:
    folders = []
    for seed in range(3):
        folder = table(tmp_path / f"seed-{seed}", seed, 0.3)
        rows = [
            {"method": "federated", "baseline": "window-only", "metric": "difference", "of": "nats_per_token", "n": 16}
            | {"bin": place, "from_token": 1024 * place, "value": gap + seed / 100, "seed": seed}
            for place, gap in enumerate((0.0, -0.5))
        ]
        facts = {"format": 1, "table": "streaming", "scale": "small", "rows": rows}
        for name in ("streaming-16384", "cold-start-16384"):
            (folder / f"results/{name}.json").write_text(json.dumps(facts))
        (folder / "results/needles-1024.json").unlink()
        folders.append(folder)
    text = report(folders)
    assert "## streaming-16384" in text and "## cold-start-16384" in text
    lines = [line for line in text.splitlines() if ", from token 1,024 " in line]
    assert len(lines) == 2 and all(line.endswith(" better |") for line in lines)
    assert text.count("from token 0 ") == 2 and text.count("no clear difference") == 2


def test_tables_that_say_nothing_together_are_refused(tmp_path: Path) -> None:
    first = table(tmp_path / "a", 0, 0.3)
    with pytest.raises(SettingsError, match="the same seed, 0"):
        report([first, table(tmp_path / "b", 0, 0.3)])
    with pytest.raises(SettingsError, match="differ in more than their seed"):
        report([first, table(tmp_path / "c", 1, 0.3, rounds=9)])
    with pytest.raises(SettingsError, match="no table's folder"):
        report([first, first / "fednl"])
    with pytest.raises(SettingsError, match="no run folder"):
        report([tmp_path / "nowhere"])


def test_other_numbers_of_questions_say_nothing_together(tmp_path: Path) -> None:
    """At other lengths they stand in no run's settings, and so in the command alone."""

    def asked(name: str, seed: int, test: int | None, n: int) -> Path:
        folder = table(tmp_path / name, seed, 0.3 + seed / 100)
        path = folder / "results/needles-1024.json"
        result = json.loads(path.read_text())
        result["rows"][0]["n"] = n
        result["command"] = "fednl reproduce needles --lengths 4096" + (f" --set data.test={test}" if test else "")
        path.write_text(json.dumps(result))
        return folder

    five, ten, usual = asked("five", 0, 5, 35), asked("ten", 1, 10, 70), asked("usual", 2, None, 35)
    with pytest.raises(SettingsError, match=r"35 questions \(data.test = 5\), and .*ten to 70 \(data.test = 10\)"):
        report([five, ten, usual])
    assert "2 seeds" in report([five, usual])
    # A seed may deal a client fewer questions than are asked for.
    assert "2 seeds" in report([usual, asked("fewer", 3, None, 33)])


def test_long_settings_with_a_slash_are_no_paths(tmp_path: Path) -> None:
    folders = [table(tmp_path / f"{seed}", seed, 0.3, template="this/" + "that " * 80) for seed in range(2)]
    assert "2 seeds" in report(folders)
