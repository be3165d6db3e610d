from __future__ import annotations

from typing import Any

import pytest

from fednl.arms import (
    TRAINED,
    VIEWS,
    adapters_hash,
    federation_of,
    inside,
    make_algorithm,
    trained_arms,
    training_of,
)
from fednl.config import Config
from fednl.evaluation.settings import ARMS


def config(**federation: object) -> Config:
    training = {"local-steps": 3, "warmup-steps": 2, "rounds": 4}
    return Config.from_dict({"training": training, "federation": federation, "lora": {"local-lr": 0.5}})


def test_every_arm_can_be_looked_at_and_its_rules_are_made_first() -> None:
    assert set(VIEWS) == set(ARMS)
    assert {view.rules for view in VIEWS.values()} <= {"", "start", *TRAINED}
    arms = Config.from_dict({"evaluation": {"arms": ["pooled", "window-only", "local-only"]}})
    assert trained_arms(arms) == ["federated", "local-only", "pooled"]
    assert len({inside(arm, "final") for arm in TRAINED}) == len(TRAINED)


@pytest.mark.parametrize(("asked", "steps"), [(0, 21), (2, 6)])
def test_the_pooled_learner_takes_the_steps_that_a_round_takes_in_all(asked: int, steps: int) -> None:
    training = training_of(config(**{"clients-per-round": asked}), "pooled", 7)
    assert (training.local_steps, training.warmup_steps) == (steps, 2 * steps // 3)
    assert (training.rounds, training.batch) == (4, 4)


@pytest.mark.parametrize("wait", [{"deadline-s": 2.0, "warm-up-s": 1.0}, {"pace": "minutes"}])
def test_a_deadline_is_for_clients_and_not_for_the_pooled_learner(wait: dict[str, object]) -> None:
    run = config(**wait, **{"clients-per-round": 3, "quorum": 2, "max-failed-rounds": 2})
    assert all(federation_of(run, arm) == run.federation for arm in TRAINED if arm != "pooled")
    pooled = federation_of(run, "pooled")
    assert [pooled.seconds_to_wait(first) for first in (True, False)] == [None, None]
    assert (pooled.clients_per_round, pooled.quorum, pooled.lora_ranks) == (0, 1, ())


def test_only_lora_has_a_rate_of_its_own() -> None:
    rates = {arm: training_of(config(), arm, 7).local_lr for arm in TRAINED}
    assert rates == {"federated": 0.003, "federated-lora": 0.5, "local-only": 0.003, "pooled": 0.003}


def test_each_arm_shares_what_it_should() -> None:
    names = ["layers.1.memory.gate.bias", "layers.1.memory.projection.k_up", "layers.1.q_proj.lora_A"]
    shared = {arm: make_algorithm(config(shared="memory"), arm).shared(names) for arm in TRAINED}
    assert shared == {"federated": names[:1], "federated-lora": names[2:], "local-only": [], "pooled": names}


def test_b06_the_hash_tells_adapters_apart_that_the_tensors_do_not() -> None:
    def hashed(setup: Any = "own", **sections: object) -> str:
        return adapters_hash(Config.from_dict({"lora": {"rank": 4}} | sections), setup)

    same = [{"lora": {"rank": 4, "alpha": 8.0}}, {"lora": {"rank": 4, "local-lr": 0.5}}, {"memory": {"start": "fresh"}}]
    assert {hashed(**sections) for sections in same} == {hashed()}
    turned = [hashed(lora={"rank": 4, "targets": targets}) for targets in ("q_proj,v_proj", "v_proj,q_proj")]
    assert turned[0] == turned[1]
    loras = [{"rank": 4, "alpha": 4.0}, {"rank": 8, "alpha": 8.0}, {"rank": 4, "targets": "q_proj"}]
    memories = [{"mixing": "convex"}, {"window-tokens": 32}, {"layers": "last:3"}]
    others = [*(hashed(lora=lora) for lora in loras), *(hashed(memory=memory) for memory in memories), hashed("lora")]
    assert len({hashed(), *others}) == 8
