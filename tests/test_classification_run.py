"""IFed-ICL from settings to tables on a tiny model: every arm, what is on disk, and that it loads again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fednl
from fednl import stored_tasks
from fednl.client import Bench
from fednl.config import Config, load_config
from fednl.errors import CheckpointError, SettingsError
from fednl.federation.params import personal
from fednl.holdings import held
from fednl.models.context_injection import COEFFICIENTS, VECTORS
from fednl.models.context_vectors import context_of, context_params
from fednl.report import report
from fednl.runs import Run
from fednl.training import config_of, evaluate, train
from small_run import byte_tokenizer, settings, tiny_backbone

ARMS = ["zero-shot", "local-icl", "federated-lora", "federated", "local-only", "pooled"]


def classification(backbone: Path, **sections: dict[str, Any]) -> Config:
    rows = [{"text": f"{word} {i}", "label": word} for word in ("sun", "rain") for i in range(60)]
    (backbone / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    base: dict[str, dict[str, Any]] = {
        "data": {"task": "classification", "tokens": 40, "clients": 3, "train": 8, "validation": 4, "test": 6},
        "classification": {"source": str(backbone / "rows.jsonl"), "demonstrations": 2, "least": 2},
        "federation": {"adapters": "context-vectors", "algorithm": "ifed-icl", "shared": "context"},
        "combine": {"weights": "uniform"},
        "lora": {"targets": "q_proj,v_proj"},
        "evaluation": {"arms": ARMS},
    }
    for name, keys in sections.items():
        base.setdefault(name, {}).update(keys)
    return settings(backbone, **base)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone") / "tiny")


@pytest.fixture(scope="module")
def run(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(classification(backbone), tmp_path_factory.mktemp("runs") / "ifed")


@pytest.mark.parametrize("override", ["demonstrations=1", "template='{text} is {label}'"])
def test_other_questions_than_the_runs_own_never_take_their_place(run: Run, override: str) -> None:
    with pytest.raises(SettingsError, match=r"\[classification\] was fixed"):
        evaluate(run.path, overrides=[f"classification.{override}"])


def test_what_a_run_was_trained_on_is_no_test_question(run: Run, tmp_path: Path) -> None:
    asked = ["evaluation.arms=['federated']"]
    own, now = (
        held(config, byte_tokenizer()) for config in (config_of(run), config_of(run).with_overrides(["data.test=20"]))
    )
    trained = {one.prompt_ids for splits in own.values() for one in (*splits.train, *splits.validation)}
    met = sum(one.prompt_ids in trained for splits in now.values() for one in splits.test)
    # 18 texts for testing, 12 for validation, 24 for training; now 60 for testing, those of validation among them.
    assert 12 < met < 42
    words = (
        rf"^{met} of these 60 test questions are among .* data\.test = 20 draws .* put back data\.test = 6, or train"
    )
    with pytest.raises(SettingsError, match=words):
        evaluate(run.path, overrides=[*asked, "data.test=20"])
    with pytest.raises(SettingsError, match="of these 20 test questions"):
        evaluate(run.path, overrides=[*asked, "data.test=20", "evaluation.clients=['client-02']"])
    assert not list((run.path / "results").glob("*test-20*"))
    for free in (
        ["evaluation.arms=['zero-shot']", "data.test=20"],
        [*asked, "data.test=3"],
        [*asked, "data.tokens=30"],
    ):
        evaluate(run.path, overrides=free)
    copied = Run(Path(shutil.copytree(run.path, tmp_path / "copied")))
    config = copied.read_json("config.json")
    rows = Path(config["classification"]["source"]).read_text(encoding="utf-8")
    (tmp_path / "more.jsonl").write_text(rows + '{"text": "rain 99", "label": "rain"}\n', encoding="utf-8")
    config["classification"]["source"] = str(tmp_path / "more.jsonl")
    copied.write_json("config.json", config)
    partition = copied.read_json("partition.json")
    partition["settings"]["classification"]["source"] = str(tmp_path / "more.jsonl")
    copied.write_json("partition.json", partition)
    for more in ([], ["data.test=3"]):
        with pytest.raises(CheckpointError, match=r'the (train|validation) data of client "client-01" are not those'):
            evaluate(copied.path, overrides=[*asked, *more])


def test_a_run_answers_another_task_though_its_own_has_a_section(run: Run) -> None:
    asked = ["data.tokens=430", "data.events=2", "data.test=1", "evaluation.arms=['federated']"]
    evaluate(run.path, "needles", overrides=asked)
    found = run.read_json("results/needles-430-test-1-events-2.json")
    assert {row["method"] for row in found["rows"]} == {"federated"} and found["changed"]["data.tokens"] == 430
    assert all(row["tokens"] == 430 for row in found["rows"])


def rows(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.read_json("results/classification.json")["rows"]
    return found


def test_e03_every_arm_answers_the_same_questions_nothing_injected_and_few_shot_among_them(run: Run) -> None:
    macro = {(row["method"], row["metric"]): row for row in rows(run) if row["client"] == "macro" and "value" in row}
    for arm in ARMS:
        accuracy, f1 = macro[arm, "accuracy"], macro[arm, "macro_f1"]
        assert (accuracy["n"], accuracy["clients"], accuracy["chance"]) == (18, 3, 0.5)
        assert accuracy["value"] == pytest.approx(accuracy["correct"] / 18)
        assert 0 <= f1["low"] <= f1["value"] <= f1["high"] <= 1
    assert {row["baseline"] for row in rows(run) if row["metric"] == "difference"} == set(ARMS) - {"federated"}
    assert macro["federated", "accuracy"]["shared"] == ["coefficients"]
    assert macro["federated-lora", "accuracy"]["shared"] == ["lora"]


def test_the_rounds_are_one_of_vectors_and_then_of_coefficients(run: Run) -> None:
    first, second, third = run.read_jsonl("rounds.jsonl")
    assert [{c["steps"] for c in row["clients"]} for row in (first, second, third)] == [{0}, {2}, {2}]
    assert all("validation_accuracy" in row["metrics"] for row in (first, second, third))
    coefficients, vectors = 4 * 2 * 2 * 2, 4 * 2 * 2 * 16

    def tensors(row: dict[str, Any], direction: str) -> list[int]:
        return [client[f"{direction}_bytes"] - client[f"{direction}_container_bytes"] for client in row["clients"]]

    for direction, with_vectors in (("up", 1), ("down", 2)):
        for row in (first, second, third):
            expected = coefficients + (vectors if row["round"] == with_vectors else 0)
            assert tensors(row, direction) == [expected] * 3
    assert all(client["cpu_s"] > 0 for client in first["clients"])


def test_the_trained_model_loads_and_injects(run: Run, backbone: Path) -> None:
    model, tokenizer = fednl.load(run.path)
    params = context_params(model)
    assert params[VECTORS].abs().sum() > 0
    assert not torch.equal(params[COEFFICIENTS], torch.tensor([0.1, 1.0]).repeat(2, 2, 1))
    ids = torch.tensor([tokenizer("Text: sun 1", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        injected = model(ids).logits
        context_of(model).vectors.zero_()
        context_of(model).coefficients.copy_(torch.tensor([0.0, 1.0]))
        assert not torch.equal(model(ids).logits, injected)


def test_local_only_is_i2cl_with_vectors_of_the_clients_own(run: Run) -> None:
    from fednl.federation.checkpoint import load_newest

    checkpoint = load_newest(run.path / "arms/local-only/checkpoints")
    assert checkpoint is not None
    own = [personal(checkpoint.params, state)[VECTORS] for state in checkpoint.client_states.values()]
    assert len(own) == 3 and not torch.equal(own[0], own[1])
    sent = run.read_jsonl("arms/local-only/rounds.jsonl")[1]["clients"][0]
    assert sent["up_bytes"] == sent["up_container_bytes"]


def test_the_report_says_what_was_compared_and_what_it_cost(run: Run) -> None:
    text = report([run.path])
    for words in (
        "### Accuracy, %",
        "### Macro-F1 over all clients' answers, %",
        "chance 50%",
        "Context vectors: position separator",
        "Shared: coefficients (8 parameters)",
        "\nn = 18.\n",
        "Cost until within 1 pp of the own best validation accuracy",
        "in-context learning from own demonstrations",
    ):
        assert words in text, words
    assert "rows.jsonl" in text and str(run.path.parent) not in text
    assert "Memory:" not in text


def test_both_adapters_train_together(backbone: Path, tmp_path: Path) -> None:
    """Memory for the context and vectors for the task, on one backbone."""
    config = classification(
        backbone,
        federation={"adapters": ["memory", "context-vectors"], "shared": ["theta", "context"]},
        memory={"window-tokens": 0},
        evaluation={"arms": ["zero-shot", "federated"]},
        training={"rounds": 2},
    )
    run = train(config, tmp_path / "both")
    shared = next(row for row in rows(run) if row["method"] == "federated")["shared"]
    assert set(shared) == {"write", "gate", "projection", "address", "coefficients"}
    model, _ = fednl.load(run.path)
    assert context_params(model)[VECTORS].abs().sum() > 0 and fednl.rules(model)


def test_from_a_client_whose_activations_are_not_finite_nothing_leaves_and_the_round_goes_on(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Bench.collect

    def collect(bench: Bench, client: str, round: int) -> dict[str, torch.Tensor]:
        if client != "client-02":
            return plain(bench, client, round)
        with torch.no_grad():
            weight = bench.model.model.layers[1].mlp.down_proj.weight
            kept = weight.clone()
            weight[0, 0] = torch.inf
            try:
                return plain(bench, client, round)
            finally:
                weight.copy_(kept)

    monkeypatch.setattr(Bench, "collect", collect)
    config = classification(backbone, evaluation={"arms": ["federated"]}, training={"rounds": 2})
    run = train(config, tmp_path / "run")
    first, second = run.read_jsonl("rounds.jsonl")
    row = next(client for client in first["clients"] if client["name"] == "client-02")
    assert (row["status"], row["reason"]) == ("failed", "NonFiniteError") and "up_bytes" not in row
    assert "layer 1 of the backbone gives NaN or infinity on this client's examples" in row["detail"]
    assert first["updated"] and [client["steps"] for client in second["clients"]] == [2, 2, 2]


def test_injected_into_answers_only_a_run_is_the_same_with_and_without_kept_prompts(
    backbone: Path, tmp_path: Path
) -> None:
    def trained(name: str, **keys: Any) -> tuple[Run, torch.Tensor]:
        config = classification(
            backbone, **{"context-vectors": {"inject": "answer", **keys}, "evaluation": {"arms": ["federated"]}}
        )
        run = train(config, tmp_path / name)
        return run, context_params(fednl.load(run.path)[0])[COEFFICIENTS]

    kept, without = trained("kept"), trained("without", **{"keep-mb": 0})
    assert torch.allclose(kept[1], without[1], atol=1e-5)
    scores = [
        [row.get("value") for row in rows(run) if row["metric"] == "nats_per_token"] for run, _ in (kept, without)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    everywhere = trained("everywhere", inject="all")
    assert not torch.allclose(kept[1], everywhere[1], atol=1e-3)


def test_prompts_are_kept_where_nothing_but_context_vectors_sits_on_the_model(backbone: Path) -> None:
    sections: dict[str, dict[str, Any]] = {"context-vectors": {"inject": "answer"}}
    bench = Bench(classification(backbone, **sections))
    bench.mount("own")
    assert context_of(bench.model).prompts is not None
    both = {"adapters": ["memory", "context-vectors"], "shared": ["theta", "context"]}
    bench = Bench(classification(backbone, **sections, federation=both, memory={"window-tokens": 0}))
    bench.mount("own")
    assert context_of(bench.model).prompts is None


def test_a_known_task_starts_from_the_store_without_a_round_of_vectors(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDNL_CACHE", str(tmp_path / "cache"))
    sections: dict[str, dict[str, Any]] = {
        "context-vectors": {"store": "on"},
        "evaluation": {"arms": ["zero-shot", "federated", "local-only"]},
    }
    first = train(classification(backbone, **sections), tmp_path / "first")
    told: list[str] = []
    again = train(
        classification(backbone, **sections), tmp_path / "again", lambda event: told.append(str(event.get("text")))
    )
    assert any("the task is known" in text for text in told)
    assert [{c["steps"] for c in row["clients"]} for row in again.read_jsonl("rounds.jsonl")] == [{2}, {2}, {2}]
    ends = [fednl.load(run.path)[0] for run in (first, again)]
    vectors, coefficients = ([context_params(model)[name] for model in ends] for name in (VECTORS, COEFFICIENTS))
    assert torch.equal(*vectors) and not torch.equal(*coefficients)
    # What each client does alone does not start from what others taught.
    local = [run.read_jsonl("arms/local-only/rounds.jsonl") for run in (first, again)]
    assert [row["metrics"] for row in local[0]] == [row["metrics"] for row in local[1]]
    other = train(
        classification(backbone, **sections, classification={"template": "{text} is {label}"}), tmp_path / "other"
    )
    assert other.read_jsonl("rounds.jsonl")[0]["clients"][0]["steps"] == 0


def test_a_new_task_goes_on_from_the_coefficients_of_like_ones_and_says_so(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDNL_CACHE", str(tmp_path / "cache"))
    told: list[str] = []

    def trained(name: str, source: str, store: str = "near", rounds: int = 2) -> Run:
        (tmp_path / source).write_bytes((backbone / "rows.jsonl").read_bytes())
        sections: dict[str, dict[str, Any]] = {
            "context-vectors": {"store": store},
            "classification": {"source": str(tmp_path / source)},
            "evaluation": {"arms": ["federated"]},
            "training": {"rounds": rounds},
        }
        told.clear()
        return train(
            classification(backbone, **sections), tmp_path / name, lambda event: told.append(str(event.get("text")))
        )

    def coefficients(run: Run) -> torch.Tensor:
        return context_params(fednl.load(run.path)[0])[COEFFICIENTS]

    classification(backbone)  # writes the rows
    first = trained("first", "a.jsonl")
    assert any("the store has no other task on this model" in text for text in told)
    second = trained("second", "b.jsonl")
    assert any("1 of 1 stored tasks on this model are like this one (cosine " in text for text in told)
    assert torch.equal(coefficients(second), coefficients(first))
    trained("second-again", "b.jsonl", rounds=1)
    assert any("the task is known" in text for text in told) and not any("like this one" in text for text in told)


def test_another_seed_or_another_content_of_the_file_is_not_the_stored_task(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed draws other splits, so that what one run trained on may be what another is asked."""
    monkeypatch.setenv("FEDNL_CACHE", str(tmp_path / "cache"))

    def key(seed: int, source: str = "") -> Any:
        own = {"source": source} if source else {}
        return Bench(classification(backbone, run={"seed": seed}, classification=own)).task_key()

    first, other, again = key(0), key(1), key(0)
    assert first == again and first != other and first.texts == other.texts
    text = (backbone / "rows.jsonl").read_text(encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    copied = key(0, str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text(text.replace("rain 1", "rain of 1"), encoding="utf-8")
    changed = key(0, str(tmp_path / "rows.jsonl"))
    assert copied.data != changed.data
    numbers = {COEFFICIENTS: torch.ones(2, 2, 2), VECTORS: torch.ones(2, 2, 16)}
    stored_tasks.store().put(first, numbers)
    config = classification(
        backbone,
        run={"seed": 1},
        **{"context-vectors": {"store": "near"}, "evaluation": {"arms": ["federated"]}, "training": {"rounds": 2}},
    )
    told: list[str] = []
    run = train(config, tmp_path / "run", lambda event: told.append(str(event.get("text"))))
    assert not any("the task is known" in text for text in told)
    assert any("the store has no other task on this model" in text for text in told)
    assert run.read_jsonl("rounds.jsonl")[0]["clients"][0]["steps"] == 0


def test_vectors_are_read_under_the_start_rules_whatever_the_model_met_before(backbone: Path) -> None:
    """A baseline must see nothing of a federated arm, and a run that is taken up again the same bits."""
    for section in ({"memory": {"window-tokens": 0}}, {"lora": {"rank": 2}}):
        kind = next(iter(section))
        config = classification(
            backbone,
            federation={"adapters": [kind, "context-vectors"], "shared": "all"},
            **{"context-vectors": {"store": "off"}, **section},
        )
        bench, fresh = Bench(config), Bench(config)
        others = {name: tensor + 0.3 for name, tensor in bench.start("own").items()}
        bench.put(others)
        fresh.mount("own")
        fresh.mount("bare")
        fresh.mount("own")  # attached anew, with rules that nobody centred
        found = [one.collect("client-01", 1)[VECTORS] for one in (bench, fresh)]
        assert torch.equal(*found)


def test_a_stored_task_of_another_shape_is_refused(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDNL_CACHE", str(tmp_path / "cache"))
    config = classification(backbone, **{"context-vectors": {"store": "on"}, "evaluation": {"arms": ["federated"]}})
    narrow = {COEFFICIENTS: torch.zeros(2, 2, 2), VECTORS: torch.zeros(2, 2, 8)}
    stored_tasks.store().put(Bench(config).task_key(), narrow)
    with pytest.raises(CheckpointError, match=r"vectors \[2, 2, 8\] for this task, and its model has \[2, 2, 16\]"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize("algorithm", ["ifed-icl", "i2cl"])
def test_a_task_without_demonstrations_is_refused_before_anything_loads(
    backbone: Path, tmp_path: Path, algorithm: str
) -> None:
    config = settings(backbone, federation={"adapters": "context-vectors", "algorithm": algorithm, "shared": "context"})
    file = tmp_path / "x.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    words = rf'\[data\] task = "needles" has no examples.*algorithm = "{algorithm}".*set task = "classification"'
    with pytest.raises(SettingsError, match=f"{re.escape(str(file))}: {words}"):
        load_config(file)
    with pytest.raises(SettingsError, match=words):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"federation": {"algorithm": "fedavg"}}, '"fedavg" does not go with adapters'),
        ({"federation": {"adapters": "memory"}}, '"ifed-icl" does not go with adapters'),
        ({"federation": {"adapters": "lora", "algorithm": "fedavg"}}, r"\[lora\] rank = 0 attaches none"),
        ({"federation": {"adapters": []}}, "name at least one adapter"),
        ({"evaluation": {"arms": ["state-zeroed"]}}, 'arms names "state-zeroed", which data.task = "classification"'),
        ({"classification": {"alfa": 1.0}}, r'unknown key "alfa" in \[classification\]; did you mean "alpha"'),
        ({"classification": {"template": "{text}"}}, "write {text} once"),
        (
            {"data": {"task": "needles"}},
            r"\[classification\] is set, but \[data\] task = \"needles\" would not read it",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    backbone: Path, sections: dict[str, dict[str, Any]], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        classification(backbone, **sections)
