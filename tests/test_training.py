"""The main job, whole: what it leaves behind, how it resumes, and that nothing depends on how it was run."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fednl
from fednl.client import Bench
from fednl.errors import CheckpointError, Interrupted, NonFiniteError, SettingsError
from fednl.evaluation.cohort import COHORT
from fednl.evaluation.measures import NEEDLES
from fednl.federation.params import Params
from fednl.federation.wire import unpack
from fednl.memory import MemoryCache
from fednl.problem import ClientProblem
from fednl.runs import Run
from fednl.training import evaluate, partition_rows, resume, train
from small_run import settings, tiny_backbone


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def final(path: Path, folder: str = "") -> dict[str, torch.Tensor]:
    return load_file(path / folder / "final" / "params.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_with_every_arm_leaves_what_the_design_says(backbone: Path, tmp_path: Path) -> None:
    config = settings(backbone, evaluation={"arms": list(NEEDLES.arms)}, lora={"local-lr": 1e-3})
    events: list[Any] = []
    run = train(config, tmp_path / "run", events.append)
    rows = run.read_json("results/needles.json")["rows"]
    macro = {row["method"]: row for row in rows if row["client"] == "macro" and row["metric"] == "candidates"}
    assert set(macro) == set(NEEDLES.arms)
    assert all(row["n"] == 12 and row["low"] <= row["value"] <= row["high"] for row in macro.values())
    assert macro["federated"]["shared"] == ["write", "gate", "projection", "address"]
    assert macro["federated-lora"]["shared"] == ["lora"]
    assert "shared" not in macro["local-only"] and "shared" not in macro["window-only"]
    assert any(row["metric"] == "aggregation_drop_pp" for row in rows)
    for arm in ("local-only", "pooled", "federated-lora"):
        for row in run.read_jsonl(f"arms/{arm}/rounds.jsonl"):
            assert row["validation_worst"] in {"passkey", "uuid-code", "name-date"}
            assert {"validation_loss", "validation_loss_worst"} <= row["metrics"].keys()
    assert [row["round"] for row in run.read_jsonl("rounds.jsonl")] == [1, 2, 3]
    for client in run.read_jsonl("rounds.jsonl")[0]["clients"]:
        assert client["num_examples"] == 6 and client["steps"] == 2
        assert client["up_bytes"] > 4 * sum(t.numel() for t in final(run.path).values())
    assert {event["event"] for event in events} >= {
        "phase",
        "round-start",
        "step",
        "client-done",
        "round-end",
    }
    model, tokenizer = fednl.load(run.path)
    assert same({n: p.detach() for n, p in fednl.rules(model).items()}, final(run.path))
    assert tokenizer.pad_token_id is not None
    assert "workers.json" not in {path.name for path in run.path.iterdir()}


def test_results_do_not_depend_on_the_number_of_processes_and_a_seed_repeats(backbone: Path, tmp_path: Path) -> None:
    runs = [
        train(settings(backbone, federation={"parallel-clients": workers}), tmp_path / f"{i}").path
        for i, workers in enumerate((1, 1, 2))
    ]
    assert same(final(runs[0]), final(runs[1])) and same(final(runs[0]), final(runs[2]))
    outcomes = [(run / "results/needles.outcomes.jsonl").read_text() for run in runs]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    other = train(settings(backbone, run={"seed": 1}), tmp_path / "other").path
    assert not same(final(runs[0]), final(other))


@pytest.fixture(scope="module")
def whole(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    return train(settings(backbone), tmp_path_factory.mktemp("whole") / "run").path


@pytest.mark.parametrize(
    ("event", "round"),
    [("round-start", 1), ("client-done", 1), ("round-start", 2), ("client-done", 2), ("round-end", 3)],
)
def test_a_run_stopped_anywhere_resumes_to_the_same_bits(
    backbone: Path, whole: Path, tmp_path: Path, event: str, round: int
) -> None:
    config = settings(backbone)

    def stop(facts: Any) -> None:
        if facts["event"] == event and facts.get("round") == round:
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        train(config, tmp_path / "stopped", stop)
    resumed = resume(tmp_path / "stopped").path
    assert same(final(whole), final(resumed))
    assert (whole / "results/needles.json").read_text() == (resumed / "results/needles.json").read_text()
    rows = [
        [{k: v for k, v in row.items() if k in ("round", "metrics")} for row in run]
        for run in map(rounds, (whole, resumed))
    ]
    assert rows[0] == rows[1]


def rounds(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


def test_results_go_when_training_goes_on_and_not_before(backbone: Path, tmp_path: Path) -> None:
    path = train(settings(backbone, training={"rounds": 2}), tmp_path / "run").path
    evaluate(path, overrides=["data.tokens=600", "evaluation.arms=['federated']"])
    asked = json.loads((path / "config.json").read_text())

    def resumed(rounds: int) -> dict[str, bytes]:
        asked["training"]["rounds"] = rounds
        (path / "config.json").write_text(json.dumps(asked))
        with nullcontext() if rounds >= 2 else pytest.raises(CheckpointError):
            resume(path)
        return {file.name: file.read_bytes() for file in (path / "results").iterdir()}

    before = {file.name: file.read_bytes() for file in (path / "results").iterdir()}
    assert {"needles.json", "needles-600.json"} <= before.keys()
    assert resumed(1) == before and resumed(2) == before
    after = resumed(3)
    assert "needles-600.json" not in after and after["needles.outcomes.jsonl"] != before["needles.outcomes.jsonl"]


@pytest.mark.parametrize(("cache", "dtype"), [("off", "float32"), ("disk", "float32"), ("disk", "bfloat16")])
def test_a_kept_prefix_leaves_no_trace_in_the_bits_of_a_run(
    backbone: Path, tmp_path: Path, cache: str, dtype: str
) -> None:
    """A run that is taken up again has lost what was kept, and meets examples in other company."""
    config = settings(backbone, training={"rounds": 2, "local-steps": 3}, prefix={"cache": cache, "dtype": dtype})
    whole = train(config, tmp_path / "whole").path

    def stop(facts: Any) -> None:
        if facts["event"] == "round-start" and facts["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        train(config, tmp_path / "stopped", stop)
    assert same(final(whole), final(resume(tmp_path / "stopped").path))


def test_measuring_resumes_arm_by_arm(backbone: Path, tmp_path: Path) -> None:
    config = settings(backbone)
    measured: list[str] = []

    def stop_in(arm: str) -> Any:
        def hook(facts: Any) -> None:
            if str(facts.get("name", "")).startswith("measuring"):
                measured.append(facts["arm"])
                if facts["arm"] == arm:
                    raise KeyboardInterrupt

        return hook

    with pytest.raises(Interrupted, match="resume"):
        train(config, tmp_path / "run", stop_in("federated"))
    resume(tmp_path / "run", stop_in(""))
    assert measured == ["window-only", "federated", "federated"]


def test_no_memory_state_and_no_name_outside_the_allow_list_is_in_any_message(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    from fednl.federation import transport

    original = transport.call_endpoint

    def spy(endpoint: Any, client: str, payload: bytes, state: bytes, on_progress: Any = None) -> Any:
        reply = original(endpoint, client, payload, state, on_progress)
        sent.extend([payload, reply[0]])
        return reply

    monkeypatch.setattr("fednl.worker.call_endpoint", spy)
    run = train(settings(backbone, federation={"shared": "memory"}), tmp_path / "run")
    allowed = {f"params/layers.1.memory.{g}.{t}" for g in ("write", "gate") for t in ("weight", "bias")}
    assert sent and all(set(unpack(buffer)[0]) == allowed for buffer in sent)
    state_shape = (2, 4, 4)
    for buffer in sent:
        assert all(tuple(t.shape[-3:]) != state_shape for t in unpack(buffer)[0].values())
    start = Bench(settings(backbone)).start("own")
    moved = {name for name, t in final(run.path).items() if not torch.equal(t, start[name])}
    assert {f"params/{name}" for name in moved} == allowed, "what is private must not move on the server"


@pytest.mark.parametrize("finite", [True, False])
def test_gradients_are_where_the_rules_are_and_not_where_the_model_is(finite: bool) -> None:
    """On an accelerator the two differ, and autograd refuses a gradient that lies elsewhere than its tensor."""

    class Bench:
        """What a problem needs of one; its model is on the CPU, and the rules come on a device without numbers."""

        def train_examples(self, client: str, round: int) -> list[Any]:
            return []

        def put(self, params: Params) -> Params:
            self.live = {name: torch.ones(tensor.shape, requires_grad=True) for name, tensor in params.items()}
            return self.live

        def nats(self, batch: Any) -> torch.Tensor:
            if not finite:
                raise NonFiniteError("NaN")
            return self.live["a"].square().sum() + self.live["b"].sum()

    rules = {name: torch.ones(3, device="meta", requires_grad=True) for name in ("a", "b", "unread")}
    loss = ClientProblem(Bench(), "client", 1).loss(rules, {})  # type: ignore[arg-type]
    penalised = loss + rules["a"].square().sum()  # as FedProx adds to it
    gradients = torch.autograd.grad(penalised, list(rules.values()))
    assert {tensor.device.type for tensor in (loss, *gradients)} == {"meta"}


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("adapters", ["memory", "lora"])
def test_a_run_on_an_accelerator_trains(backbone: Path, tmp_path: Path, adapters: str) -> None:
    config = settings(backbone, federation={"adapters": adapters, "shared": "all"}, lora={"rank": 2})
    assert config.backbone.device == "auto"
    assert all(row["updated"] for row in rounds(train(config, tmp_path / "run").path))


def test_gradient_through_the_problem_equals_plain_autograd(backbone: Path) -> None:
    bench = Bench(settings(backbone))
    params = {name: t + 0.05 for name, t in bench.start("own").items()}
    problem = ClientProblem(bench, "passkey", round=1)
    batch = next(problem.batches("train", 1))
    leaves = {name: t.clone().requires_grad_() for name, t in params.items()}
    loss = problem.loss(leaves, batch)
    bridged = torch.autograd.grad(2 * loss, list(leaves.values()))
    live = bench.put(params)
    out = bench.model(
        batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"], use_cache=False
    )
    torch.testing.assert_close(loss.detach(), out.loss.detach())
    plain = torch.autograd.grad(2 * out.loss, [live[name] for name in leaves])
    for name, a, b in zip(leaves, bridged, plain, strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_batches_depend_on_seed_client_round_and_purpose_only(backbone: Path) -> None:
    bench = Bench(settings(backbone))

    def ids(client: str, round: int, purpose: str) -> list[list[int]]:
        return [b["input_ids"].flatten().tolist() for b in ClientProblem(bench, client, round).batches(purpose, 2)]

    assert ids("passkey", 1, "train") == ids("passkey", 1, "train")
    assert ids("passkey", 1, "train") != ids("passkey", 2, "train")
    assert ids("passkey", 1, "train") != ids("passkey", 1, "ala")


def test_held_out_and_empty_clients(backbone: Path, tmp_path: Path) -> None:
    run = train(settings(backbone, data={"hold-out-clients": ["uuid-code"]}), tmp_path / "held")
    assert {c["name"] for c in rounds(run.path)[0]["clients"]} == {"passkey", "name-date"}
    scored = {r["client"] for r in run.read_json("results/needles.json")["rows"] if r["method"] == "federated"}
    assert scored - set(COHORT) == {"passkey", "uuid-code", "name-date", "macro"}
    with pytest.raises(fednl.errors.DataError, match="None of the 3 clients has a training example"):
        train(settings(backbone, data={"train": 0}), tmp_path / "empty")


def test_evaluate_at_another_length_keeps_the_rules(whole: Path, tmp_path: Path) -> None:
    run = Run.open(shutil.copytree(whole, tmp_path / "run"))
    before = final(run.path)
    evaluate(run.path, overrides=["data.tokens=700"])
    rows = run.read_json("results/needles-700.json")["rows"]
    assert rows and all(row["tokens"] == 700 for row in rows)
    assert same(before, final(run.path))
    with pytest.raises(SettingsError, match=r"\[memory\] was fixed"):
        evaluate(run.path, overrides=["memory.rank=3"])
    for section, override in (
        ("context-vectors", "start-lambda=0.9"),
        ("fedavg", "nothing=1"),
        ("traffic", "up='float16'"),
    ):
        with pytest.raises(SettingsError, match=rf"\[{section}\]"):
            evaluate(run.path, overrides=[f"{section}.{override}"])
    with pytest.raises(SettingsError, match="no finished rules for local-only"):
        evaluate(run.path, overrides=["evaluation.arms=['local-only']"])


def test_start_rules_are_used_and_refused_where_they_do_not_fit(backbone: Path, whole: Path, tmp_path: Path) -> None:
    again = settings(backbone, memory={"start": str(whole / "final")})
    assert same(Bench(again).start("own"), final(whole))
    with pytest.raises(CheckpointError, match=r"memory\.start = .* memory\.rank = 2, and it is 3"):
        Bench(settings(backbone, memory={"start": str(whole / "final"), "rank": 3})).start("own")
    with pytest.raises(CheckpointError, match='"public": none are shipped'):
        Bench(settings(backbone, memory={"start": "public"})).start("own")
    with pytest.raises(SettingsError, match=r'memory\.start = ".*nowhere": No rules in'):
        train(settings(backbone, memory={"start": str(tmp_path / "nowhere")}), tmp_path / "bad")


def test_full_start_rules_begin_low_rank_ones_at_the_nearest_of_that_rank(backbone: Path, whole: Path) -> None:
    full, low = (
        final(whole),
        Bench(settings(backbone, memory={"start": str(whole / "final"), "write-rank": 1})).start("own"),
    )
    pairs = [name.removesuffix("weight") for name in full if name.endswith(".write.weight")]
    assert pairs and not any(name.endswith(".write.weight") for name in low)
    for pair in pairs:
        missed = full[f"{pair}weight"] - low[f"{pair}up"] @ low[f"{pair}down"]
        torch.testing.assert_close(missed.norm(), torch.linalg.svdvals(full[f"{pair}weight"])[1:].norm())
    assert all(torch.equal(low[name], tensor) for name, tensor in full.items() if not name.endswith(".write.weight"))


@pytest.mark.parametrize("gate", ["head", "layer"])
def test_gates_from_the_input_begin_those_without_at_their_biases(backbone: Path, whole: Path, gate: str) -> None:
    full = final(whole)
    small = Bench(settings(backbone, memory={"start": str(whole / "final"), "gate": gate})).start("own")
    assert full.keys() - small.keys() == {name for name in full if name.endswith(".gate.weight")} != set()
    for name, tensor in small.items():
        wanted = full[name].mean(0, keepdim=True) if (name.endswith(".gate.bias") and gate == "layer") else full[name]
        assert torch.equal(tensor, wanted)


def test_partition_lists_everyone_without_text(backbone: Path) -> None:
    rows = partition_rows(settings(backbone))
    assert [(r["client"], r["split"], r["n"]) for r in rows[:3]] == [
        ("passkey", "train", 6),
        ("passkey", "validation", 2),
        ("passkey", "test", 4),
    ]
    assert all(set(row) == {"client", "split", "n", "tokens", "sha256"} for row in rows)


def test_a_loaded_model_generates_with_a_private_memory(whole: Path) -> None:
    model, tokenizer = fednl.load(whole)
    ids = tokenizer("a text that is longer than nothing", return_tensors="pt").input_ids
    cache = MemoryCache(model)
    out = model.generate(ids, cache=cache, max_new_tokens=3, do_sample=False)
    assert cache.get_seq_length() == out.shape[1] - 1


@pytest.mark.parametrize(("federation", "told"), [({"pace": "minutes"}, 1), ({}, 0)])
def test_one_process_says_that_it_cannot_end_a_client_that_hangs(
    backbone: Path, tmp_path: Path, federation: dict[str, Any], told: int
) -> None:
    notes: list[str] = []
    small = {
        "data": {"clients": 1, "train": 1, "validation": 0, "test": 1},
        "training": {"rounds": 1, "local-steps": 1},
    }
    config = settings(backbone, federation=federation, evaluation={"arms": ["federated"]}, **small)
    train(config, tmp_path / "run", lambda event: notes.append(str(event.get("text", ""))))
    assert sum("waits until it ends: set federation.parallel-clients = 2" in note for note in notes) == told
    resume(tmp_path / "run", lambda event: notes.append(str(event.get("text", ""))))
    assert sum("waits until it ends" in note for note in notes) == told, "nothing is left to train"
