"""Streams of tasks and what stays private, in whole runs over a tiny backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fednl.arms import make_algorithm
from fednl.client import Bench
from fednl.config import Config
from fednl.errors import Interrupted, SettingsError
from fednl.federation.checkpoint import load_round, read_tensors
from fednl.federation.params import equal
from fednl.measuring_stream import measure_stream
from fednl.memory import rules as rules_of
from fednl.models.loading import load
from fednl.report import report
from fednl.report.stream import one_task_line
from fednl.runs import Run
from fednl.training import resume, train
from small_run import settings, tiny_backbone

TASKS = {"order": ["passkey", "name-date", "multi-key"], "rounds-per-task": 1, "rotate": True}
SIZES = {"tokens": 560, "clients": 3, "train": 4, "validation": 1, "test": 2}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def stream(backbone: Path, algorithm: str = "fedavg", **sections: Any) -> Config:
    own = {"data": SIZES, "tasks": TASKS, "federation": {"algorithm": algorithm, "keep-checkpoints": 1}}
    return settings(backbone, **{**own, **sections})


def final(run: Run) -> dict[str, torch.Tensor]:
    return read_tensors(run.path / "final/params.safetensors")[0]


@pytest.fixture(scope="module")
def whole(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    arms = {"arms": ["federated", "local-only"]}
    return train(
        stream(backbone, "ewc", evaluation=arms, ewc={"strength": 1e4}), tmp_path_factory.mktemp("runs") / "run"
    )


def test_a_stream_leaves_every_task_after_every_task_forgetting_and_transfer(whole: Run) -> None:
    rows = whole.read_json("results/stream.json")["rows"]
    assert {row["method"] for row in rows} == {"federated", "local-only"}
    places = {(row["after"], row["task"]) for row in rows if row["metric"] == "candidates"}
    assert places == {(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)}
    assert {row["n"] for row in rows if "after" in row} == {6}
    assert sum(row["metric"] in ("forgetting", "backward_transfer") for row in rows) == 2 * 2 * 2
    # The last column is the run's own result on the same questions.
    last = [row["value"] for row in rows if row.get("after") == 3 and row["metric"] == "nats_per_token"]
    own = whole.read_json("results/needles.json")["rows"]
    macro = {
        row["method"]: row["value"] for row in own if (row["client"], row["metric"]) == ("macro", "nats_per_token")
    }
    assert sum(last[:3]) / 3 == pytest.approx(macro["federated"])
    text = report([whole.path])
    assert "## Stream of tasks" in text and "average forgetting" in text
    assert "client-02: name-date, then multi-key, then passkey" in text
    assert "FedAvg's, bit for bit" not in text
    assert "examples per client and task: 4 train" in text


def test_the_answers_after_a_task_are_those_of_the_rules_of_its_last_round(whole: Run, backbone: Path) -> None:
    from fednl.evaluation.outcomes import load_outcomes

    checkpoint = load_round(whole.path / "checkpoints", 1)  # beyond keep-checkpoints = 1, for it ends a task
    bench = Bench(Config.from_dict(whole.read_json("config.json")))
    expected = bench.score("federated", "client-02", checkpoint.params, lambda facts: None, ["name-date"])
    kept = load_outcomes(whole.path / "results/stream.outcomes.jsonl")["federated@1"]
    assert [one for one in kept if one.client == "client-02"] == expected
    assert {one.task for one in expected} == {"name-date"}


def test_a_task_is_trained_on_in_its_rounds_alone_and_boundaries_change_what_follows(
    backbone: Path, tmp_path: Path, whole: Run
) -> None:
    bench = Bench(stream(backbone))
    assert [{one.task for one in bench.train_examples("client-02", round)} for round in (1, 2, 3)] == [
        {"name-date"}, {"multi-key"}, {"passkey"}
    ]  # fmt: skip
    assert bench.tasks_in("client-02", 1) == ("name-date", "name-date", True)
    assert {one.task for one in bench.train_examples("pooled", 1)} == set(TASKS["order"])
    assert len(bench.train_examples("pooled", 1)) == 3 * SIZES["train"]
    plain = train(stream(backbone, evaluation={"arms": ["window-only"]}), tmp_path / "plain")
    assert not equal(final(plain), final(whole))
    assert load_equal(plain, whole, 1)  # before the first task has ended there is nothing to hold


def test_fedweit_answers_an_old_task_with_that_tasks_own_parts_and_the_base_as_it_is_now(
    backbone: Path, tmp_path: Path
) -> None:
    from fednl.evaluation.outcomes import load_outcomes

    order = ["passkey", "name-date"]
    two = {"order": order, "rounds-per-task": 1, "rotate": True}
    sizes = {"tokens": 560, "clients": 2, "train": 2, "validation": 1, "test": 2}
    own = {"sparsity": 1e-4, "drift": 1.0}
    rate = {"rounds": 2, "local-lr": 0.3}
    config = stream(
        backbone, "fedweit", data=sizes, tasks=two, training=rate, evaluation={"arms": ["federated"]}, fedweit=own
    )
    run = train(config, tmp_path / "run")
    bench, algorithm = Bench(config), make_algorithm(config, "federated")
    answers = load_outcomes(run.path / "results/needles.outcomes.jsonl")["federated"]
    assert [one.index for one in answers if one.client == "client-01"] == list(range(4))  # in the order asked
    newest = load_round(run.path / "checkpoints", 2)
    rules = algorithm.answers(newest.params, newest.client_states["client-01"])
    base = {name: tensor for name, tensor in rules.items() if "/" not in name}
    assert equal(base, final(run))
    for task in order:
        own_rules = {name.removeprefix(f"{task}/"): t for name, t in rules.items() if name.startswith(f"{task}/")}
        assert own_rules.keys() == base.keys() and not equal(own_rules, base)
        expected = bench.score("federated", "client-01", own_rules, lambda facts: None, [task])
        assert [one for one in answers if (one.client, one.task) == ("client-01", task)] == expected
        assert bench.score("federated", "client-01", base, lambda facts: None, [task]) != expected
    # After the first task the second one's questions are not asked, and the first one's with its own parts.
    first = load_round(run.path / "checkpoints", 1)
    then = algorithm.answers(first.params, first.client_states["client-01"])
    kept = load_outcomes(run.path / "results/stream.outcomes.jsonl")["federated@1"]
    expected = bench.score("federated", "client-01", then, lambda facts: None, ["passkey"])
    assert [one for one in kept if one.client == "client-01"] == expected
    # What validation measured after the last round, too.
    told = [row["validation_loss"] for row in run.read_jsonl("rounds.jsonl")[-1]["clients"]]
    assert told[0] == pytest.approx(bench.validate("federated", "client-01", rules)[0], rel=1e-9)
    assert told[0] != pytest.approx(bench.validate("federated", "client-01", base)[0], rel=1e-9)
    # Whoever loads the run has the base.
    model, _ = load(run.path)
    assert all(torch.equal(tensor, final(run)[name]) for name, tensor in rules_of(model).items())


def load_equal(left: Run, right: Run, round: int) -> bool:
    return equal(*(load_round(run.path / "checkpoints", round).params for run in (left, right)))


def test_with_one_task_they_are_fedavg_and_the_report_says_so(backbone: Path, tmp_path: Path) -> None:
    one = {"tasks": {"order": ["passkey"], "rounds-per-task": 2}, "training": {"rounds": 2}}
    alone = {"arms": ["window-only"]}
    runs = [train(stream(backbone, kind, evaluation=alone, **one), tmp_path / kind) for kind in ("fedavg", "fedssi")]
    assert equal(final(runs[0]), final(runs[1]))
    said = ["has nothing to hold fast: these rules are FedAvg's" in report([run.path]) for run in runs]
    assert said == [False, True]
    assert one_task_line({"federation": {"algorithm": "ewc"}}) != []
    assert one_task_line({"federation": {"algorithm": "ewc"}, "tasks": {"order": ["a", "b"]}}) == []


def test_a_stream_stopped_between_tasks_or_while_measured_resumes_to_the_same_rows(
    backbone: Path, tmp_path: Path, whole: Run
) -> None:
    config = Config.from_dict(whole.read_json("config.json"))

    def stop_when(**wanted: Any) -> Any:
        def stop(facts: Any) -> None:
            if all(facts.get(key) == value for key, value in wanted.items()):
                raise KeyboardInterrupt

        return stop

    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", stop_when(event="round-start", round=2))
    # Eight answers in all after two tasks, twelve after one of the arms' whole tests.
    with pytest.raises(Interrupted):
        resume(tmp_path / "run", stop_when(event="step", arm="local-only", total=12))
    run = resume(tmp_path / "run")
    for name in ("stream.json", "needles.json"):
        assert (run.path / "results" / name).read_text() == (whole.path / "results" / name).read_text()


def test_a_stream_without_test_questions_is_trained_and_has_no_rows(backbone: Path, tmp_path: Path) -> None:
    one = {"order": ["passkey"]}
    data = {"clients": 1, "train": 2, "validation": 0, "test": 0}
    arms = {"arms": ["federated"]}
    run = train(stream(backbone, data=data, tasks=one, training={"rounds": 1}, evaluation=arms), tmp_path / "run")
    assert run.read_json("results/stream.json")["rows"] == []
    assert "## Stream of tasks" in report([run.path])


def test_a_floor_that_a_task_cannot_reach_is_refused_though_all_tasks_together_would(
    backbone: Path, tmp_path: Path
) -> None:
    """Each client has 4 examples of each of 3 tasks, and a round is of one."""
    with pytest.raises(SettingsError, match=r'has 4 training examples of the task "passkey", so none would share'):
        train(stream(backbone, privacy={"min-examples": 5}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_that_do_not_add_up_are_refused_before_anything_is_loaded(backbone: Path) -> None:
    with pytest.raises(SettingsError, match=r"3 tasks of 2 rounds, but \[training\] rounds = 3; set rounds = 6"):
        stream(backbone, tasks={**TASKS, "rounds-per-task": 2})
    with pytest.raises(SettingsError, match="name each task once"):
        stream(backbone, tasks={"order": ["passkey", "passkey"]})
    for data, tasks, words in (
        ({"task": "public"}, TASKS, r'\[tasks\] order is set, but data.task = "public" has no kinds of data for it'),
        ({}, {"order": ["passkey", "nonsense"]}, r'order names "nonsense", which is no kind .*choose from passkey, '),
        ({"dirichlet-alpha": 0.5}, TASKS, r"dirichlet-alpha = 0.5 mixes kinds, and \[tasks\] order parts them"),
        ({}, {"rotate": True}, r"settings: \[tasks\] rotate = true, but there is no stream without an order"),
        ({}, {"rounds-per-task": 3}, r"\[tasks\] rounds-per-task = 3, but .* leave rounds-per-task out"),
    ):
        rounds = {"rounds": len(tasks.get("order", [1]))}
        with pytest.raises(SettingsError, match=words):
            stream(backbone, data={**SIZES, **data}, tasks=tasks, training={**rounds, "local-steps": 2})


def test_nothing_is_measured_without_a_stream(backbone: Path, tmp_path: Path) -> None:
    run = Run(tmp_path)
    measure_stream(run, settings(backbone), None, {}, lambda event: None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_w10_a_shared_and_a_private_adapter_per_client_both_last_over_rounds(backbone: Path, tmp_path: Path) -> None:
    both = {"lora": {"rank": 2, "targets": "q_proj,v_proj"}, "evaluation": {"arms": ["federated"]}}
    ways = {"theta": ".memory.", "lora": "lora_"}
    for shared, mark in ways.items():
        config = settings(backbone, data={"clients": 2}, training={"rounds": 2}, federation={"shared": shared}, **both)
        run = train(config, tmp_path / shared)
        checkpoint = load_round(run.path / "checkpoints", 2)
        for client in ("passkey", "uuid-code"):
            own = {n.removeprefix("private/") for n in checkpoint.client_states[client] if n.startswith("private/")}
            assert own == {name for name in checkpoint.params if mark not in name}
        private = [f"private/{name}" for name in checkpoint.params if mark not in name and not name.endswith("lora_A")]
        states = [checkpoint.client_states[client] for client in ("passkey", "uuid-code")]
        assert any(not torch.equal(states[0][name], states[1][name]) for name in private)
