"""Rounds over clients with LoRA: what each way of averaging makes of it, and what its row says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import GATE, LORA_A, LORA_B, WIDTH, Bench, forge, own_settings, start_params

from fednl.errors import SettingsError
from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.exchange import CombineSettings, Exchange
from fednl.federation.message import Message
from fednl.federation.params import Params
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import Reply

TRAINING = TrainingSettings(rounds=3, local_steps=3, batch=4, local_lr=0.1, optimizer_state="reset")


def bench(path: Path, kind: str, ranks: tuple[str, ...] = (), **fields: Any) -> Bench:
    algorithm = ALGORITHMS[kind](own_settings(kind), "all")
    settings = FederationSettings(lora_ranks=ranks)
    return Bench(path, algorithm=algorithm, settings=settings, training=TRAINING, lora=True, **fields)


def product(params: Params) -> torch.Tensor:
    return params[LORA_B].double() @ params[LORA_A].double()


def replies(toy: Bench, transport: Any, round: int) -> dict[str, Message]:
    came = [Message.from_bytes(reply.payload) for reply in transport.returned]
    return {message.client: message for message in came if message.round == round and message.num_examples}


def mean_product(messages: dict[str, Message]) -> torch.Tensor:
    total = sum(message.num_examples for message in messages.values())
    products = [product(message.params) * message.num_examples for message in messages.values()]
    return torch.stack(products).sum(0) / total


def errors(toy: Bench) -> list[float | None]:
    return [row["metrics"].get("lora_error") for row in toy.rows()]


def test_b04_plain_averaging_says_in_every_round_what_it_misses(tmp_path: Path) -> None:
    toy = bench(tmp_path / "a", "fedavg", dtype=torch.float64)
    transport = toy.transport()
    params = toy.run(transport)
    exact = mean_product(replies(toy, transport, TRAINING.rounds))
    missed = float(torch.linalg.norm(exact - product(params)) / torch.linalg.norm(exact))
    assert missed > 1e-4
    assert errors(toy)[-1] == pytest.approx(missed, rel=1e-9)
    assert all(row["metrics"]["lora_error_of_update"] > 0 for row in toy.rows())


def test_nothing_is_said_where_averaging_is_exact_by_construction_or_there_is_no_lora(tmp_path: Path) -> None:
    frozen, bare = bench(tmp_path / "a", "ffa-lora"), bench(tmp_path / "b", "fedavg")
    bare.lora = False
    frozen.run()
    bare.run()
    assert errors(frozen) == errors(bare) == [None] * TRAINING.rounds


def test_what_a_cap_takes_away_is_not_called_what_averaging_misses(tmp_path: Path) -> None:
    capped = bench(tmp_path, "fedavg", exchange=Exchange(combine=CombineSettings(norm_cap=0.01)))
    capped.run()
    assert errors(capped) == [None] * TRAINING.rounds


@pytest.mark.parametrize("clients", [2, 4])
def test_b04_flexlora_takes_the_best_of_the_exact_mean(tmp_path: Path, clients: int) -> None:
    sizes = dict(list({"ada": 5, "bob": 4, "cyd": 12, "dan": 7}.items())[:clients])
    toy = bench(tmp_path / "a", "flexlora", dtype=torch.float64, sizes=sizes)
    transport = toy.transport()
    params = toy.run(transport)
    exact = mean_product(replies(toy, transport, TRAINING.rounds))  # [1, 3]: of rank 1, and LoRA's rank is 2
    torch.testing.assert_close(product(params), exact, rtol=0, atol=1e-12)
    assert errors(toy)[-1] == pytest.approx(0.0, abs=1e-12)


def test_other_rules_of_flexlora_and_flora_are_averaged(tmp_path: Path) -> None:
    for kind in ("flexlora", "flora"):
        toy = bench(tmp_path / kind, kind, dtype=torch.float64)
        transport = toy.transport()
        params = toy.run(transport)
        came = replies(toy, transport, TRAINING.rounds).values()
        total = sum(message.num_examples for message in came)
        mean = sum(float(message.params[GATE]) * message.num_examples for message in came) / total
        assert float(params[GATE]) == pytest.approx(mean, abs=1e-14)


def test_flora_adds_up_the_exact_means_of_all_rounds(tmp_path: Path) -> None:
    toy = bench(tmp_path / "a", "flora", dtype=torch.float64)
    transport = toy.transport()
    params = toy.run(transport)
    summed = sum(mean_product(replies(toy, transport, round)) for round in range(1, TRAINING.rounds + 1))
    torch.testing.assert_close(product(params), torch.as_tensor(summed), rtol=0, atol=1e-12)
    assert errors(toy) == pytest.approx([0.0] * TRAINING.rounds, abs=1e-12)
    start = start_params(torch.float64, lora=True)
    # Clients send their fresh component only, and find the same fresh one in every round.
    for message in transport.sent:
        assert torch.equal(message.params[LORA_A][1:], start[LORA_A][1:])
        assert not message.params[LORA_B][:, 1:].any()
    assert {tuple(m.params[LORA_A].shape) for m in replies(toy, transport, 1).values()} == {(1, WIDTH)}


def test_flora_says_what_its_bounded_part_loses() -> None:
    algorithm = ALGORITHMS["flora"](own_settings("flora"), "all")
    rng = torch.Generator().manual_seed(0)
    sent = {LORA_A: torch.randn(2, 4, generator=rng), LORA_B: torch.zeros(5, 2)}
    fresh = {LORA_A: torch.randn(3, 4, generator=rng), LORA_B: torch.randn(5, 3, generator=rng)}
    combined = Message({name: sent[name] for name in sent}, fresh, num_examples=1)
    new, _ = algorithm.server_step(sent, combined, {})
    values = torch.linalg.svdvals(product(fresh))
    lost = float(torch.linalg.norm(values[1:]) / torch.linalg.norm(values))
    assert algorithm.measure(sent, combined, new, fresh)["lora_error"] == pytest.approx(lost, rel=1e-5)
    assert not new[LORA_B][:, 1:].any() and torch.equal(new[LORA_A][1:], sent[LORA_A][1:])


@pytest.mark.parametrize("kind", ["fedavg", "flexlora"])
def test_clients_of_lower_rank_send_less_the_same_in_every_round(tmp_path: Path, kind: str) -> None:
    toy = bench(tmp_path / "a", kind, ranks=("a*=1",), sizes={"ada": 5, "bob": 5, "abe": 0})
    transport = toy.transport()
    toy.run(transport)
    rows = toy.rows()
    for client in ("ada", "bob"):
        told = [next(row for row in r["clients"] if row["name"] == client) for r in rows]
        for key in ("down_bytes", "up_bytes"):
            assert max(row[key] for row in told) - min(row[key] for row in told) < 64  # the digits of the loss
    sent = {m.client: m.params[LORA_B].shape[1] for m in transport.sent}
    assert sent == {"ada": 1, "abe": 1, "bob": 2}
    assert all(row["updated"] and not row["refused"] for row in rows)
    assert {row["name"]: row["status"] for row in rows[0]["clients"]}["abe"] == "empty"


def test_exact_averaging_with_unlike_ranks(tmp_path: Path) -> None:
    toy = bench(tmp_path / "a", "flexlora", ranks=("ada=1",), dtype=torch.float64)
    transport = toy.transport()
    params = toy.run(transport)
    came = replies(toy, transport, TRAINING.rounds)
    assert len(came["ada"].params[LORA_A]) == 1
    parts = []
    for place in range(2):  # a component is averaged over those who have it
        have = {client: message for client, message in came.items() if len(message.params[LORA_A]) > place}
        one = slice(place, place + 1)
        parts.append(
            mean_product(
                {
                    client: replace(m, params={LORA_A: m.params[LORA_A][one], LORA_B: m.params[LORA_B][:, one]})
                    for client, m in have.items()
                }
            )
        )
    torch.testing.assert_close(product(params), parts[0] + parts[1], rtol=0, atol=1e-12)


def test_a_reply_of_another_rank_than_asked_for_is_refused(tmp_path: Path) -> None:
    def whole(replies: list[Reply]) -> list[Reply]:
        whose = {reply.client: Message.from_bytes(reply.payload).params for reply in replies}
        return [forge(r, params=whose["bob"]) if r.client == "ada" else r for r in replies]

    toy = bench(tmp_path / "a", "fedavg", ranks=("ada=1",))
    toy.run(toy.transport(whole))
    assert all(row["updated"] and row["refused"] == {"shape": 1} for row in toy.rows())


def test_a_resumed_run_must_have_the_same_ranks(tmp_path: Path) -> None:
    bench(tmp_path / "a", "fedavg", ranks=("ada=1",)).run(stop_after=1)
    with pytest.raises(Exception, match="lora-ranks"):
        bench(tmp_path / "a", "fedavg").run()


def test_a_pattern_that_fits_nobody_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="eve=1"):
        bench(tmp_path / "a", "fedavg", ranks=("eve=1",)).run()
