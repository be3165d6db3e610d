"""`python tests/report/test_tables.py` writes the golden file anew; read the change before keeping it."""

import io
import json
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import CONFIG, make_run, round_row, rows_at

from fednl.errors import CheckpointError, SettingsError
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.rows import result_rows
from fednl.report import report, terminal_table
from fednl.runs import Run

GOLDEN = Path(__file__).with_name("golden.md")


def shown(rows: list[dict[str, object]], metric: str = "candidates", width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(terminal_table(rows, metric))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_finished_run_equals_the_golden_file(tmp_path: Path) -> None:
    assert report([make_run(tmp_path / "a-run").path]) == GOLDEN.read_text(encoding="utf-8")


def test_the_report_gives_every_number_its_context(tmp_path: Path) -> None:
    text = report([make_run(tmp_path / "a-run").path])
    for part in (
        "federated rules minus window only: +41.0 pp, 95% interval [+27.0, +60.0], n = 30",
        "70.0 [55.0, 85.0]",
        "n = 10 questions per client, 30 in all (20 for local-only rules); chance 25%",
        "write, gate, projection (80 parameters), used by: federated rules, events removed",
        "1.707 MB",
        "uuid empty (round 1)",
        "date\\|name refused: non-finite (round 2)",
        "Refused messages, federated rules: non-finite 1.",
        "keys context, address-layer 2, address-rank 0, mixing additive",
        "window of 64 tokens and 4 sinks",
        "filler essays.txt (sha256 beef)",
        "LlamaForCausalLM, 30 layers",
        "not above chance",
    ):
        assert part in text
    # The user's folders are nobody's business.
    assert "/home" not in text
    # Every line of a table has as many columns as its head, a client's name with a bar in it included.
    lines = text.splitlines()
    for before, line in pairwise(lines):
        if before.startswith("|") and line.startswith("|"):
            assert before.replace("\\|", "").count("|") == line.replace("\\|", "").count("|")


def test_settings_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    memory = CONFIG["memory"] | {"keys": "token"}
    run.write_json("config.json", CONFIG | {"memory": memory})
    assert "keys token, mixing additive" in report([run.path])


def test_bytes_are_a_range_where_they_differ_and_absent_where_unknown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    run.append_jsonl("rounds.jsonl", round_row(3, uuid={"up_bytes": 2_000_000}))
    assert "1.707 to 2.000 MB" in report([run.path])
    for name in ("rounds.jsonl", "arms/local-only/rounds.jsonl"):
        (run.path / name).write_text(json.dumps({"round": 1, "clients": [{"name": "uuid"}]}) + "\n")
    text = report([run.path])
    line = next(line for line in text.splitlines() if line.startswith("| federated rules  |"))
    assert line.count(" - ") >= 4


def test_what_averaging_lora_missed_is_told_by_arm(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    assert "LoRA updates" not in report([run.path])
    for number, error in ((1, 0.015), (2, 0.25)):
        row = round_row(number)
        row["metrics"] |= {"lora_error": error, "lora_error_of_update": 2 * error}
        run.append_jsonl("arms/federated-lora/rounds.jsonl", row)
    expected = "Missed of the exact mean of LoRA updates, FedAvg-LoRA, window, no memory: 1.50% to 25.00% of it, "
    assert expected + "3.00% to 50.00% of what a round changed (2 rounds)." in report([run.path])


def test_the_client_with_the_highest_validation_loss_is_named_by_arm(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    assert "Highest validation loss" not in report([run.path])
    row = round_row(3) | {"validation_worst": "uuid"}
    row["metrics"]["validation_loss_worst"] = 4.0
    run.append_jsonl("rounds.jsonl", row)
    assert "Highest validation loss of a client, federated rules: uuid, 4.000." in report([run.path])


def test_an_unfinished_run_is_said_plainly(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "new")
    run.write_json("config.json", CONFIG)
    run.append_jsonl("rounds.jsonl", round_row(1) | {"updated": False, "reason": "quorum: 1 of 2 replies"})
    text = report([run.path])
    assert f"federated rules: 1 of 2 rounds are done; continue with `fednl train --resume {run.path}`" in text
    assert f"Nothing is measured yet; `fednl train --resume {run.path}` goes on" in text
    assert "environment.json is missing" in text
    assert "left the model as it was, federated rules: quorum: 1 of 2 replies (round 1)" in text


def test_a_run_that_holds_only_its_settings_is_no_crash(tmp_path: Path) -> None:
    run = Run.at(tmp_path / "bare")
    run.write_json("config.json", {})
    text = report([run.path])
    assert "not recorded" in text
    assert "Nothing is measured yet" in text


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": []}'])
def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "a-run")
    (run.path / "results" / "broken.json").write_text(content)
    (run.path / "environment.json").write_text(content)
    (run.path / "arms" / "local-only" / "rounds.jsonl").write_text("{\n{}\n")
    (run.path / "partition.json").write_text(content)
    (run.path / "final" / "params.safetensors").write_bytes(b"no tensors")
    text = report([run.path])
    for name in ("broken.json", "environment.json", "rounds.jsonl line 1"):
        assert name in text
    assert "federated rules minus window only" in text


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("results/needles.json", {"rows": [rows_at(320)[0] | {"value": "much"}]}),
        ("results/needles.json", {"rows": [rows_at(320)[0] | {"client": [1]}]}),
        ("config.json", CONFIG | {"federation": {"shared": 3}}),
        ("rounds.jsonl", {"round": 1, "clients": 3}),
    ],
)
def test_values_of_another_kind_are_one_sentence(tmp_path: Path, name: str, row: dict[str, object]) -> None:
    run = make_run(tmp_path / "a-run")
    run.append_jsonl(name, row) if name.endswith("l") else run.write_json(name, row)
    with pytest.raises(CheckpointError, match=r"a-run: a value in .* is not of the kind that fednl writes"):
        report([run.path])


def test_rounds_that_are_missing_are_counted_by_their_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    run.truncate_jsonl("rounds.jsonl", 0)
    run.append_jsonl("rounds.jsonl", round_row(2))
    text = report([run.path])
    assert "1 of 2 rounds of federated rules are missing in rounds.jsonl" in text
    assert "Unfinished" not in text


def test_the_precision_that_was_used_is_printed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    run.write_json("config.json", CONFIG | {"backbone": {"id": "smollm2-135m", "dtype": "auto"}})
    run.write_json("partition.json", run.read_json("partition.json") | {"dtype": "bfloat16"})
    line = next(line for line in report([run.path]).splitlines() if line.startswith("- Backbone"))
    assert line.endswith(", bfloat16")


def test_f02_the_setup_says_what_was_asked_and_that_no_token_is_added(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")

    def line(**hashes: str) -> str:
        rows = [{"client": client, "split": "test", "sha256": digest} for client, digest in hashes.items()]
        run.write_json("partition.json", {"rows": [*rows, {"client": "a", "split": "train", "sha256": "f"}]})
        return next(line for line in report([run.path]).splitlines() if line.startswith("- Prompts: "))

    assert re.search(
        r"no BOS or other special token added; .* test prompts .* sha256 [0-9a-f]{64}$", line(a="1", b="2")
    )
    assert line(a="1", b="2") == line(b="2", a="1") != line(a="2", b="1")
    assert line() == "- Prompts: tokens of the text alone, no BOS or other special token added"


def test_results_under_other_settings_name_them_and_no_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    changed = {"data.filler": "/home/someone/essays.txt", "data.events": 6}
    run.write_json("results/needles-events-6.json", {"rows": rows_at(320), "changed": changed})
    text = report([run.path])
    assert "other settings: data.filler = essays.txt, data.events = 6." in text and "/home" not in text


def test_longer_texts_come_after_shorter_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    for tokens in (1280, 640):
        run.write_json(f"results/needles-{tokens}.json", {"rows": rows_at(tokens)})
    text = report([run.path])
    places = [text.index(f"## {title}") for title in ("needles-640, 640", "needles-1280, 1280")]
    assert places == sorted(places)


def test_rows_that_lack_something_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    rows = [
        {"method": "federated"},
        3,
        {"method": "a", "client": "b", "metric": "difference", "value": 1, "n": 1},
    ]
    run.write_json("results/needles.json", {"rows": rows})
    run.write_json("results/other.json", {"rows": []})
    text = report([run.path])
    assert "results/needles.json holds no rows" in text
    assert "results/other.json holds no rows" in text


def test_a_path_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(SettingsError, match=str(path)):
            report([path])


def test_several_runs_are_compared_first(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second")
    second.write_json("results/needles-640.json", {"rows": rows_at(640)})
    text = report([first.path, second.path])
    head = text[: text.index("# first")]
    assert head.startswith("# 2 runs, macro averages")
    assert head.count(" federated rules |") == 3
    assert "640" in head
    assert text.count("\n# ") == 2
    assert text.rindex("## needles, 320 tokens") < text.index("## needles-640, 640 tokens")
    empty = Run.at(tmp_path / "empty")
    empty.write_json("config.json", CONFIG)
    assert "None of the runs is measured yet" in report([empty.path, empty.path])


def test_runs_that_differ_in_their_seed_are_put_together(tmp_path: Path) -> None:
    runs = []
    for seed in range(3):
        run = make_run(tmp_path / f"seed-{seed}")
        run.write_json("config.json", {**CONFIG, "run": {"seed": seed}})
        rows = [{**row, "seed": seed} for row in rows_at(320)]
        for row in rows:
            if row["metric"] == "difference":
                row["value"] += 0.01 * seed
        run.write_json("results/needles.json", {"rows": rows})
        runs.append(run.path)
    text = " ".join(report(runs).split())
    assert "## needles: seeds of one setting (seed-0, seed-1, seed-2)" in text
    # Mean 0.42, spread 0.01, three seeds: 4.3027 * 0.01 / sqrt 3 = 0.0248.
    line = "| +41.0 (0), +42.0 (1), +43.0 (2) | +42.0 pp [+39.5, +44.5] | better |"
    assert line in text
    assert "no claim: fewer than 3 seeds" in report(runs[:2])
    other = make_run(tmp_path / "other")
    other.write_json("config.json", {**CONFIG, "training": {"rounds": 9}})
    assert "nothing here says that a method is better" in report([runs[0], other.path])


def test_seeds_are_put_together_length_by_length(tmp_path: Path) -> None:
    runs = []
    for seed in range(3):
        run = make_run(tmp_path / f"seed-{seed}")
        run.write_json("config.json", {**CONFIG, "run": {"seed": seed}})
        other = [{**row, "value": -row["value"]} if row["metric"] == "difference" else row for row in rows_at(640)]
        rows = [{**row, "seed": seed} for row in rows_at(320) + other]
        for row in rows:
            if row["metric"] == "difference":
                row["value"] += 0.01 * seed
        run.write_json("results/needles.json", {"rows": rows})
        runs.append(run.path)
    _, short, long = re.split(r"## needles, (?:320|640) tokens: seeds of one setting", " ".join(report(runs).split()))
    assert "+41.0 (0), +42.0 (1), +43.0 (2)" in short and "| better |" in short
    assert "-41.0 (0), -40.0 (1), -39.0 (2)" in long and "| worse |" in long


def test_lengths_in_one_file_get_a_section_each(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    run.write_json("results/needles.json", {"rows": rows_at(320) + rows_at(640)})
    text = report([run.path])
    assert "## needles, 320 tokens" in text
    assert "## needles, 640 tokens" in text


def test_a_leak_is_said_loudly(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    rows = rows_at(320)
    for row in rows:
        if row["method"] == "events-removed" and row["metric"] == "candidates":
            row["low"] = 0.3
    run.write_json("results/needles.json", {"rows": rows})
    assert "above chance: the prompts give answers away" in report([run.path])


def test_the_rows_of_the_evaluation_are_understood(tmp_path: Path) -> None:
    def outcomes(hits: int) -> list[Outcome]:
        return [Outcome("a", i, 0, 0 if i < hits else 1, i < hits, False, 1.0 + i, 0.0, 2) for i in range(20)]

    golds = [outcomes(12), outcomes(12)]
    rows = result_rows({"federated": golds[0], "window-only": golds[1]}, seed=0, tokens=9, resamples=200)
    run = make_run(tmp_path / "a-run")
    run.write_json("results/needles.json", {"rows": rows})
    assert "federated rules minus window only: +0.0 pp" in report([run.path])
    assert "no clear difference" in report([run.path])


def test_a_difference_without_an_interval_is_told_and_a_p_is_called_by_its_test(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-run")
    rows = rows_at(320)
    row = {key: value for key, value in rows[-6].items() if key not in ("low", "high", "verdict")}
    f1 = rows[-5] | {"of": "macro_f1", "p": 0.012}
    run.write_json("results/needles.json", {"rows": [*rows[:-6], row, f1]})
    text = report([run.path])
    assert "minus window only: -0.87 nats/token, no interval, n = 30 over 3 clients: no verdict" in text
    assert "macro-F1: federated rules minus window only: +41.0 pp" in text and "randomised p = 0.012: better" in text


def test_the_terminal_table_fits_a_terminal() -> None:
    text = shown(rows_at(320))
    assert max(map(len, text.splitlines())) <= 80
    for part in ("passkey", "macro", "70.0", "55-85", "chance 25%", "attention", "95% interval"):
        assert part in text
    assert "…" not in text
    assert "1.60" in shown(rows_at(320), "nats_per_token")
    assert "macro" in shown([])


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a-run").path
    code = (
        "import sys; from pathlib import Path; from fednl.report import report; report([Path(sys.argv[1])]);"
        "assert not {'torch', 'transformers', 'scipy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(report([make_run(Path(folder) / "a-run").path]), encoding="utf-8")
