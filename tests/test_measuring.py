"""What is measured, with whose rules, and where it is written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fednl.answers import forget
from fednl.arms import TRAINED, make_algorithm
from fednl.client import Bench
from fednl.errors import CheckpointError, DataError, SettingsError
from fednl.evaluation.outcomes import load_outcomes
from fednl.evaluation.shares import wilson
from fednl.federation.checkpoint import load_newest
from fednl.federation.params import personal
from fednl.federation.wire import unpack
from fednl.measuring import changed_settings, results_name
from fednl.report import report
from fednl.runs import Run
from fednl.training import config_of, evaluate, resume, train
from fednl.worker import handlers
from small_run import settings, tiny_backbone

ARMS = ["window-only", "federated", "local-only"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def whole(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose projections are private to each client, asked two at a time."""
    config = settings(
        backbone,
        federation={"shared": ["memory", "layers.1.*.v_up"], "clients-per-round": 2},
        training={"local-lr": 0.1},
        evaluation={"arms": ARMS},
    )
    return train(config, tmp_path_factory.mktemp("whole") / "run").path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Run:
    return Run.open(shutil.copytree(whole, tmp_path / "run"))


def results(run: Run, name: str = "needles") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run.read_json(f"results/{name}.json")["rows"]
    return rows


def test_other_settings_never_overwrite_the_runs_own(backbone: Path) -> None:
    own = settings(backbone)
    for override, name in [
        ("data.tokens=700", "needles-700"),
        ("memory.window-tokens=0", "needles-window-tokens-0"),
        ("data.events=3", "needles-events-3"),
        ("evaluation.answer=letters", "needles-answer-letters"),
        ("data.filler=/home/someone/my essays.txt", "needles-filler-my-essays.txt-d3c07635"),
        ("data.filler=/home/another/my essays.txt", "needles-filler-my-essays.txt-06cbf009"),
        ('data.hold-out-clients=["passkey"]', "needles-hold-out-clients-passkey"),
        ("evaluation.arms=['federated']", "needles"),
        ("evaluation.batch=2", "needles"),
        ("data.train=9", "needles"),
        ("data.task=public", "public"),
        ("data.task=mmlu", "mmlu"),
        ("data.task=mmlu mmlu.shots=5", "mmlu-shots-5"),
        ("data.task=mmlu mmlu.template=harness", "mmlu-template-harness"),
    ]:
        config = own.with_overrides(override.split(" ") if "mmlu" in override else [override])
        assert results_name(config.data.task, changed_settings(own, config)) == name
    # What a task does not read of how examples are spread changes none of its questions.
    tailed, public = settings(backbone, data={"imbalance": 10.0}), settings(backbone, data={"task": "public"})
    assert changed_settings(tailed, public) == {}
    assert changed_settings(tailed, own) == {"data.imbalance": 1.0}
    # Clients of several kinds are asked in the shares that their training examples were dealt in.
    mixed = settings(backbone, data={"dirichlet-alpha": 0.5})
    assert changed_settings(mixed, mixed.with_overrides(["data.train=9"])) == {"data.train": 9}


def test_other_clients_answers_do_not_pass_for_those_asked_for(run: Run, tmp_path: Path) -> None:
    """Three clients with four questions each: the answers of one are as many as those of another."""
    copied = Run(Path(shutil.copytree(run.path, tmp_path / "copied")))
    for client in ("passkey", "uuid-code"):
        table = copied.read_json("config.json")
        table["evaluation"]["clients"] = [client]
        copied.write_json("config.json", table)
        resume(copied.path)
        answered = (copied.path / "results/needles.outcomes.jsonl").read_text().splitlines()
        assert {json.loads(line)["client"] for line in answered} == {client}


def test_rows_are_what_the_outcomes_say_by_hand(run: Run) -> None:
    outcomes = [json.loads(line) for line in (run.path / "results/needles.outcomes.jsonl").read_text().splitlines()]
    rows = {(r["method"], r["client"], r["metric"]): r for r in results(run) if "baseline" not in r}
    for arm in ARMS:
        shares = []
        for client in ("passkey", "uuid-code", "name-date"):
            mine = [one for one in outcomes if one["arm"] == arm and one["client"] == client]
            right = sum(one["chosen"] == one["gold"] for one in mine)
            row = rows[arm, client, "candidates"]
            assert (row["n"], row["correct"], row["chance"]) == (4, right, 0.25) and len(mine) == 4
            assert (row["low"], row["high"]) == wilson(right, 4)
            nats = sum(one["nats_per_token"] for one in mine) / 4
            assert rows[arm, client, "nats_per_token"]["value"] == pytest.approx(nats, rel=1e-12)
            shares.append(right / 4)
        assert rows[arm, "macro", "candidates"]["value"] == pytest.approx(sum(shares) / 3)
    gaps = {r["baseline"]: r for r in results(run) if r["metric"] == "difference" and r["of"] == "candidates"}
    for baseline, gap in gaps.items():
        pair = (rows["federated", "macro", "candidates"], rows[baseline, "macro", "candidates"])
        assert gap["value"] == pytest.approx(pair[0]["value"] - pair[1]["value"])


def test_the_rows_say_what_crossed_the_network(run: Run) -> None:
    rows = [row for row in results(run) if "baseline" not in row]
    assert {row["method"]: row.get("shared") for row in rows} == {
        "window-only": None,
        "federated": ["write", "gate", "layers.1.*.v_up"],
        "local-only": None,
    }
    rules = load_file(run.path / "final/params.safetensors")
    count = sum(rule.numel() for name, rule in rules.items() if re.search(r"\.(write|gate)\.|v_up$", name))
    assert f"write, gate, layers.1.*.v_up ({count} parameters)" in report([run.path])


def test_a_run_that_shares_nothing_says_so(backbone: Path, tmp_path: Path) -> None:
    config = settings(backbone, federation={"algorithm": "local-only"}, training={"rounds": 1})
    run = train(config, tmp_path / "run")
    assert all("shared" not in row for row in results(run))


def test_each_client_is_measured_with_its_own_private_rules(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[str, dict[str, torch.Tensor]] = {}

    def spied(config: Any) -> Any:
        made = handlers(config)
        score = made["score"]

        def spy(job: Any, blobs: Any, tell: Any) -> Any:
            if job["arm"] == "federated":
                used[job["client"]] = unpack(blobs[0])[0]
            return score(job, blobs, tell)

        return made | {"score": spy}

    monkeypatch.setattr("fednl.worker.handlers", spied)
    evaluate(run.path)
    final, newest = load_file(run.path / "final/params.safetensors"), load_newest(run.path / "checkpoints")
    assert newest is not None and set(used) == {"passkey", "uuid-code", "name-date"}
    for client, rules in used.items():
        kept = newest.client_states[client]
        for name, tensor in rules.items():
            assert torch.equal(tensor, kept.get(f"private/{name}", final[name])), (client, name)
    private = [name for name in final if f"private/{name}" in newest.client_states["passkey"]]
    assert private and "layers.1.memory.projection.v_up" not in private
    assert any(not torch.equal(used["passkey"][name], used["uuid-code"][name]) for name in private)


def test_fedalas_clients_answer_with_their_own_rules_though_all_are_shared(backbone: Path, tmp_path: Path) -> None:
    small = {"data": {"clients": 2, "train": 2, "validation": 0, "test": 1}, "evaluation": {"arms": ["federated"]}}
    config = settings(backbone, federation={"algorithm": "fedala"}, training={"rounds": 1, "local-lr": 0.3}, **small)
    run = train(config, tmp_path / "run")
    newest = load_newest(run.path / "checkpoints")
    assert newest is not None and set(make_algorithm(config, "federated").shared(newest.params)) == set(newest.params)
    bench, answers = Bench(config), load_outcomes(run.path / "results/needles.outcomes.jsonl")["federated"]
    for client, state in newest.client_states.items():
        own = bench.score("federated", client, personal(newest.params, state), lambda facts: None)
        assert [one for one in answers if one.client == client] == own
        assert bench.score("federated", client, newest.params, lambda facts: None) != own


def test_validation_uses_each_clients_own_private_rules_too(run: Run) -> None:
    newest = load_newest(run.path / "checkpoints")
    assert newest is not None
    bench = Bench(config_of(run))
    losses = [
        bench.validate("federated", client, personal(newest.params, state))[0]
        for client, state in sorted(newest.client_states.items())
    ]
    told = run.read_jsonl("rounds.jsonl")[-1]["metrics"]["validation_loss"]
    assert told == pytest.approx(sum(losses) / 3, rel=1e-9)
    start = [bench.validate("federated", client, newest.params)[0] for client in sorted(newest.client_states)]
    assert told != pytest.approx(sum(start) / 3, rel=1e-9), "the case tells private rules from those of the start"


@pytest.mark.parametrize("arm", ["federated", "local-only"])
def test_private_rules_that_are_lost_are_no_start_rules(run: Run, arm: str) -> None:
    folder = run.path / TRAINED[arm].folder / "checkpoints"
    (folder / "round-3" / "params.safetensors").write_bytes(b"torn")
    before = {f: (run.path / "results" / f).read_text() for f in ("needles.json", "needles.outcomes.jsonl")}
    with pytest.raises(CheckpointError, match=r"lacks round 3, .*finished\.json and resume"):
        evaluate(run.path)
    assert {f: (run.path / "results" / f).read_text() for f in before} == before
    (run.path / TRAINED[arm].folder / "finished.json").unlink()
    resume(run.path)
    assert {f: (run.path / "results" / f).read_text() for f in before} == before


def test_private_rules_are_those_of_the_round_that_final_is_of_though_a_later_checkpoint_is_there(run: Run) -> None:
    folder, before = run.path / "checkpoints", (run.path / "results/needles.outcomes.jsonl").read_text()
    shutil.copytree(folder / "round-3", folder / "round-4")
    facts = json.loads((folder / "round-4/state.json").read_text())
    (folder / "round-4/state.json").write_text(json.dumps({**facts, "round": 4, "clients": {}}))
    evaluate(run.path)
    assert (run.path / "results/needles.outcomes.jsonl").read_text() == before


def test_more_rounds_are_trained_and_measured_anew(run: Run) -> None:
    evaluate(run.path, overrides=["data.tokens=700", "evaluation.arms=['federated']"])
    config = run.read_json("config.json")
    config["training"]["rounds"] = 4
    run.write_json("config.json", config)
    old = load_outcomes(run.path / "results/needles.outcomes.jsonl")
    with pytest.raises(SettingsError, match="no finished rules for federated, local-only"):
        evaluate(run.path)
    resume(run.path)
    new = load_outcomes(run.path / "results/needles.outcomes.jsonl")
    assert new["window-only"] == old["window-only"] and new["federated"] != old["federated"]
    assert [row["round"] for row in run.read_jsonl("rounds.jsonl")] == [1, 2, 3, 4]
    assert not (run.path / "results/needles-700.json").exists(), "those were other rules"


def test_some_arms_measured_again_leave_the_others_in_the_table(run: Run) -> None:
    before = (run.path / "results/needles.json").read_text()
    evaluate(run.path, overrides=["evaluation.arms=['federated']"])
    assert (run.path / "results/needles.json").read_text() == before
    evaluate(run.path, overrides=["evaluation.arms=['public-rules']"])
    assert {row["method"] for row in results(run)} == {*ARMS, "public-rules"}


def test_only_what_is_missing_is_measured_where_nothing_is_wanted_anew(run: Run) -> None:
    measured: list[str] = []
    asked = ["data.tokens=640", "evaluation.arms=['window-only', 'federated']"]
    evaluate(run.path, overrides=["data.tokens=640", "evaluation.arms=['federated']"])
    evaluate(run.path, None, lambda event: measured.append(str(event.get("name", ""))), asked, anew=False)
    assert [name for name in measured if name.startswith("measuring")] == ["measuring: window-only"]
    assert set(load_outcomes(run.path / "results/needles-640.outcomes.jsonl")) == {"window-only", "federated"}


def test_some_clients_alone_are_asked_and_one_without_questions_is_refused(run: Run) -> None:
    evaluate(run.path, overrides=["evaluation.arms=['federated']", "evaluation.clients=['name-date']"])
    rows = run.read_json("results/needles-clients-name-date.json")["rows"]
    assert {row["client"] for row in rows if row["metric"] == "candidates"} - {"macro", "worst", "spread"} == {
        "name-date"
    }
    with pytest.raises(SettingsError, match=r'clients names "law", who has no test questions; choose from passkey'):
        evaluate(run.path, overrides=["evaluation.clients=['law']"])


def test_results_under_other_settings_say_so(run: Run) -> None:
    evaluate(run.path, overrides=["memory.window-tokens=200", "evaluation.arms=['federated']"])
    assert run.read_json("results/needles-window-tokens-200.json")["changed"] == {"memory.window-tokens": 200}
    text = report([run.path])
    assert "The run's own rules under other settings: memory.window-tokens = 200." in text
    assert "changed" not in run.read_json("results/needles.json")


def test_a_client_that_did_not_train_has_no_rules_of_its_own(run: Run) -> None:
    evaluate(run.path, overrides=["data.clients=4", "evaluation.arms=['federated', 'local-only']"])
    clients = {
        arm: {one.client for one in load_outcomes(run.path / "results/needles-clients-4.outcomes.jsonl")[arm]}
        for arm in ("federated", "local-only")
    }
    assert clients["local-only"] == {"passkey", "uuid-code", "name-date"}
    assert clients["federated"] == clients["local-only"] | {"phrase-code"}


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"torn"])
def test_damaged_outcomes_are_measured_again(run: Run, damage: bytes) -> None:
    path = run.path / "results/needles.outcomes.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[: len(before) // 2] + damage)
    with pytest.raises(DataError, match="is not an outcome"):
        load_outcomes(path)
    told: list[Any] = []
    resume(run.path, told.append)
    assert path.read_bytes() == before
    assert any("damaged" in str(event.get("text")) for event in told)


def test_outcomes_that_lost_lines_are_measured_again(run: Run) -> None:
    path = run.path / "results/needles.outcomes.jsonl"
    before = path.read_text()
    path.write_text("".join(before.splitlines(keepends=True)[:-1]))
    resume(run.path)
    assert path.read_text() == before


def test_arms_are_not_compared_over_a_text_that_changed_between_them(run: Run, tmp_path: Path) -> None:
    """One arm was measured, the text edited, and the next arm's answers to new questions were paired with the old."""
    config, path = run.read_json("config.json"), run.path / "results/needles.outcomes.jsonl"
    text = Path(config["data"]["filler"]).read_text(encoding="utf-8")
    config["data"]["filler"] = str(tmp_path / "edited.txt")
    (tmp_path / "edited.txt").write_text(text.replace("river", "rivers"), encoding="utf-8")
    run.write_json("config.json", config)
    before = path.read_bytes()
    more = ["evaluation.arms=['public-rules']"]
    for anew in (True, False):
        with pytest.raises(CheckpointError, match="answers of window-only, federated, local-only to other questions"):
            evaluate(run.path, overrides=more, anew=anew)
    unnamed = "".join(
        json.dumps({key: value for key, value in json.loads(line).items() if key != "question"}) + "\n"
        for line in before.decode().splitlines()
    )
    path.write_text(unnamed)  # as before there were names: the results file says what was asked
    with pytest.raises(CheckpointError, match="remove that file and have all arms measured again"):
        evaluate(run.path, overrides=more)
    assert path.read_text() == unnamed
    evaluate(run.path)  # all of them anew
    assert path.read_bytes() != before and {row["method"] for row in results(run)} == set(ARMS)


def test_only_results_of_changed_rules_are_forgotten(run: Run) -> None:
    forget(run, [])
    forget(run, ["pooled"])
    read = run.path / "results/streams-64.jsonl"
    read.write_text('{"arm": "federated", "item": 0, "found": {}}\n')
    forget(run, ["pooled"])
    assert read.exists() and (run.path / "results/needles.json").exists()
    forget(run, ["local-only"])
    assert read.exists()
    forget(run, ["federated"])
    assert list((run.path / "results").iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda config: config["memory"].update(rank=3), r"\[memory\] rank = 3, but the run began with 2"),
        (lambda config: config["data"].update(test=5), 'the test data of client "'),
        (lambda config: config["data"].update(train=7), 'the train data of client "'),
        (lambda config: config["federation"].update(shared="theta"), r"\[federation\] shared = "),
    ],
)
def test_an_edited_run_is_not_taken_up(run: Run, damage: Any, words: str) -> None:
    config = run.read_json("config.json")
    damage(config)
    run.write_json("config.json", config)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises((SettingsError, CheckpointError), match=words):
        resume(run.path)
    assert {path: path.read_bytes() for path in before} == before


def test_another_backbone_under_the_same_name_is_not_measured(run: Run, tmp_path: Path) -> None:
    other = tiny_backbone(tmp_path / "other", seed=1)
    config = run.read_json("config.json")
    config["backbone"]["id"] = str(other)
    run.write_json("config.json", config)
    for work in (resume, evaluate):
        with pytest.raises(CheckpointError, match=r"began with another backbone \(sha256 "):
            work(run.path)


def test_lost_final_rules_come_back_from_the_checkpoint(run: Run) -> None:
    path = run.path / "final/params.safetensors"
    before = path.read_bytes()
    path.unlink()
    with pytest.raises(SettingsError, match="no finished rules for federated"):
        evaluate(run.path)
    resume(run.path)
    assert path.read_bytes() == before


def test_rules_that_do_not_fit_the_arm_are_told(run: Run) -> None:
    path = run.path / "final/params.safetensors"
    rules = load_file(path)
    rules.pop("layers.1.memory.gate.bias")
    save_file(rules, path, metadata={"fednl": '{"round": 3}'})
    with pytest.raises(CheckpointError, match="lacks 1 rules of this model"):
        evaluate(run.path)
