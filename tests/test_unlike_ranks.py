"""Whole runs with `federation.lora-ranks`: every arm works, and every client is asked with what it would be sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fednl
from fednl.arms import TRAINED, VIEWS
from fednl.config import Config
from fednl.errors import SettingsError
from fednl.evaluation.measures import NEEDLES
from fednl.federation.checkpoint import load_newest, read_tensors
from fednl.federation.lora_ranks import cut, padded
from fednl.federation.params import Params, equal, kept
from fednl.federation.wire import unpack
from fednl.runs import Run
from fednl.training import train
from fednl.worker import handlers
from small_run import settings, tiny_backbone

RANK, OWN, MERGED = 4, 1, 2
LOW, HIGH = "passkey", "uuid-code"
Asked = dict[tuple[str, str, str], list[Params]]
"""By operation, arm and client: the rules of each question, in order."""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def trained(
    backbone: Path, folder: Path, algorithm: str, low: str = LOW, **sections: dict[str, Any]
) -> tuple[Run, Asked]:
    """A run of two clients, one of rank 1, with every arm that has rules; and with which rules clients were asked."""
    asked: Asked = {}

    def spied(config: Any) -> Any:
        made = handlers(config)

        def spy(op: str) -> Any:
            def handle(job: Any, blobs: Any, tell: Any) -> Any:
                asked.setdefault((op, job["arm"], job["client"]), []).append(unpack(blobs[0])[0])
                return made[op](job, blobs, tell)

            return handle

        return made | {"score": spy("score"), "validate": spy("validate")}

    federation = {"algorithm": algorithm, "shared": ["theta", "lora"], "lora-ranks": [f"{low}={OWN}"]}
    own = {
        "data": {"clients": 2, "train": 2, "validation": 1, "test": 1},
        "lora": {"rank": RANK, "targets": "q_proj"},
        "training": {"rounds": 1, "local-steps": 1, "optimizer-state": "reset"},
        "federation": federation,
        "evaluation": {"arms": [arm for arm in NEEDLES.arms if VIEWS[arm].rules]},
    }
    own |= {"flora": {"merged-rank": MERGED}} if algorithm == "flora" else {}
    own |= {"fedala": {"steps": 1, "most-passes": 1}} if algorithm == "fedala" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fednl.worker.handlers", spied)
        run = train(settings(backbone, **{**own, **sections}), folder / "run")
    return run, asked


def ranks(params: Params) -> set[int]:
    """The ranks of the LoRA factors there are."""
    found = {len(t) for name, t in params.items() if name.endswith("lora_A")}
    return found | {t.shape[1] for name, t in params.items() if name.endswith("lora_B")}


@pytest.mark.parametrize("algorithm", ["fedavg", "fedala", "ffa-lora", "flora", "local-only"])
def test_every_arm_is_trained_and_each_client_is_asked_with_its_own_rank(
    backbone: Path, tmp_path: Path, algorithm: str
) -> None:
    run, asked = trained(backbone, tmp_path, algorithm)
    answered = {row["method"] for row in run.read_json("results/needles.json")["rows"]}
    assert answered == {arm for arm in NEEDLES.arms if VIEWS[arm].rules} >= set(TRAINED)
    own = OWN + MERGED * (algorithm == "flora")
    for (op, arm, client), rules in asked.items():
        low = OWN if arm in ("federated-lora", "local-only") else own
        expected = {low} if client == LOW and arm != "pooled" else {RANK}
        assert [ranks(one) for one in rules] == [expected] * len(rules), (op, arm, client)
    assert {op for op, arm, _ in asked if arm == "federated"} == {"score", "validate"}


@pytest.fixture(scope="module")
def plain(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Asked]:
    arms = {"arms": ["federated", "local-only"]}
    return trained(backbone, tmp_path_factory.mktemp("plain"), "fedavg", evaluation=arms)


def test_scores_and_validation_are_of_what_a_client_would_be_sent(plain: tuple[Run, Asked]) -> None:
    run, asked = plain
    final, _ = read_tensors(run.path / "final/params.safetensors")
    for op in ("score", "validate"):
        assert equal(asked[op, "federated", LOW][-1], cut(final, OWN))
        assert equal(asked[op, "federated", HIGH][-1], final)
    assert any(tensor[:, OWN:].any() for name, tensor in final.items() if name.endswith("lora_B"))


def test_a_local_only_client_trains_its_own_rank_from_the_same_start(plain: tuple[Run, Asked]) -> None:
    run, asked = plain
    newest = load_newest(run.path / "arms/local-only/checkpoints")
    start, _ = read_tensors(run.path / "arms/local-only/final/params.safetensors")
    assert newest is not None
    own = kept(newest.client_states[LOW], "private")
    assert equal(asked["score", "local-only", LOW][0], own) and ranks(own) == {OWN} and ranks(start) == {RANK}
    moved = [name for name, tensor in cut(start, OWN).items() if not torch.equal(tensor, own[name])]
    assert any(name.endswith("lora_B") for name in moved)


def test_a_client_is_loaded_with_the_components_that_it_has(
    plain: tuple[Run, Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = plain
    final, _ = read_tensors(run.path / "final/params.safetensors")
    put: list[Params] = []
    monkeypatch.setattr("fednl.models.loading.assign", lambda live, tensors, source: put.append(tensors))
    for client, rules in ((LOW, padded(cut(final, OWN), final)), (HIGH, final), ("", final)):
        fednl.load(run.path, client=client)
        assert equal(put[-1], rules)


def test_the_answers_after_a_task_are_of_what_a_client_would_be_sent(backbone: Path, tmp_path: Path) -> None:
    _, asked = trained(
        backbone,
        tmp_path,
        "fedavg",
        "client-01",
        tasks={"order": ["passkey", "name-date"], "rounds-per-task": 1, "rotate": True},
        training={"rounds": 2, "local-steps": 1},
        evaluation={"arms": ["federated"]},
    )
    # At the end, then after the first task.
    assert [ranks(one) for one in asked["score", "federated", "client-01"]] == [{OWN}] * 2
    assert [ranks(one) for one in asked["score", "federated", "client-02"]] == [{RANK}] * 2


def test_what_cannot_be_cut_by_rank_is_refused_when_settings_are_read() -> None:
    federation = {"algorithm": "scaffold", "shared": ["theta", "lora"], "lora-ranks": ["passkey=1"]}
    with pytest.raises(SettingsError, match=r'lora-ranks is set, but algorithm = "scaffold" sends tensors of one size'):
        Config.from_dict({"federation": federation, "lora": {"rank": RANK}, "evaluation": {"arms": list(TRAINED)}})
