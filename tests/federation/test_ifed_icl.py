"""IFed-ICL in the round loop: vectors up once and down once, then coefficients only; the arithmetic of both stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import Tampered

from fednl.errors import FednlError, SettingsError
from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.combine import WITHHELD
from fednl.federation.exchange import CombineSettings, Exchange
from fednl.federation.local import LocalPlan, train_locally
from fednl.federation.loop import run_rounds
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, equal, personal
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.transport import Reply
from fednl.runs import Run
from fednl.seeding import torch_rng

COEFFICIENTS, VECTORS = "context.coefficients", "context.vectors"
SIZES = {"a": 3, "b": 12, "c": 5}
TRAINING = TrainingSettings(rounds=4, local_steps=3, local_lr=0.05)


@dataclass(frozen=True)
class Injected:
    """Finds the coefficients with which this client's target is a sum of the vectors."""

    client: str
    num_examples: int
    round: int = 1
    collected: list[str] = field(default_factory=list)

    def own_vectors(self) -> torch.Tensor:
        return torch.randn(2, 2, 3, generator=torch_rng(0, "vectors", self.client))

    def collect(self) -> Params:
        self.collected.append(self.client)
        return {VECTORS: self.own_vectors()}

    def loss(self, params: Params, batch: torch.Tensor) -> torch.Tensor:
        return ((params[COEFFICIENTS][..., :1] * params[VECTORS]).sum((0, 1)) - batch).square().sum()

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[torch.Tensor]:
        draw = torch_rng(0, purpose, self.client, self.round)
        for _ in range(steps):
            yield torch.randn(3, generator=draw)


def start() -> Params:
    return {COEFFICIENTS: torch.tensor([0.1, 1.0]).repeat(2, 2, 1), VECTORS: torch.zeros(2, 2, 3)}


@dataclass
class Toy:
    path: Path
    name: str = "ifed-icl"
    sizes: Mapping[str, int] = field(default_factory=lambda: dict(SIZES))
    settings: FederationSettings = field(default_factory=FederationSettings)
    weights: str = "uniform"
    min_examples: int = 2
    collected: list[str] = field(default_factory=list)
    training: TrainingSettings = TRAINING

    def __post_init__(self) -> None:
        kind = ALGORITHMS[self.name]
        self.algorithm = kind(kind.Settings(min_examples=self.min_examples), "context")
        self.transport = Tampered(self.endpoint, self.sizes, lambda replies: self.change(replies))

    def change(self, replies: list[Reply]) -> list[Reply]:
        return replies

    def endpoint(self, client: str, message: Message, state: ClientState, tell: Any) -> tuple[Message, ClientState]:
        problem = Injected(client, self.sizes[client], message.round, self.collected)
        return train_locally(self.algorithm, problem, message, state, LocalPlan.of(self.training, message.round), tell)

    def run(self, **named: Any) -> Params:
        self.path.mkdir(parents=True, exist_ok=True)
        exchange = Exchange(combine=CombineSettings(weights=self.weights))  # type: ignore[arg-type]
        run = Run(self.path)
        return run_rounds(
            self.algorithm,
            self.transport,
            start(),
            self.settings,
            self.training,
            run,
            seed=0,
            exchange=exchange,
            **named,
        )

    def rows(self) -> list[dict[str, Any]]:
        return Run(self.path).read_jsonl("rounds.jsonl")

    def replies(self) -> list[Message]:
        return [Message.from_bytes(reply.payload) for reply in self.transport.returned]


def mean_vectors(weights: Mapping[str, float]) -> torch.Tensor:
    total = sum(weights.values())
    return sum(weights[c] / total * Injected(c, 1).own_vectors().double() for c in weights).float()  # type: ignore[union-attr]


def test_vectors_travel_up_once_and_down_once_and_coefficients_in_between(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    params = toy.run()
    sent = {(m.round, m.client): sorted([*m.params, *m.extra]) for m in toy.transport.sent}
    came = {(m.round, m.client): sorted([*m.params, *m.extra]) for m in toy.replies()}
    for client in SIZES:
        assert [sent[n, client] for n in (1, 2, 3, 4)] == [[COEFFICIENTS], [COEFFICIENTS, VECTORS]] + [
            [COEFFICIENTS]
        ] * 2
        assert [came[n, client] for n in (1, 2, 3, 4)] == [[COEFFICIENTS, VECTORS]] + [[COEFFICIENTS]] * 3
    assert toy.collected == sorted(SIZES)
    assert [{client["steps"] for client in row["clients"]} for row in toy.rows()] == [{0}, {3}, {3}, {3}]
    assert torch.allclose(params[VECTORS], mean_vectors(dict.fromkeys(SIZES, 1.0)), atol=1e-7)
    assert not torch.equal(params[COEFFICIENTS], start()[COEFFICIENTS])


def test_weighted_by_examples_the_vectors_are_the_mean_over_all_examples(tmp_path: Path) -> None:
    by_examples = Toy(tmp_path / "e", weights="examples").run()[VECTORS]
    uniform = Toy(tmp_path / "u").run()[VECTORS]
    assert torch.allclose(by_examples, mean_vectors(SIZES), atol=1e-7)
    assert not torch.allclose(by_examples, uniform, atol=1e-2)


def test_the_mean_of_coefficients_is_that_of_the_replies(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    params = toy.run()
    last = [m.params[COEFFICIENTS] for m in toy.replies() if m.round == 4]
    assert torch.allclose(params[COEFFICIENTS], torch.stack(last).mean(0), atol=1e-7)


def test_a_single_client_is_i2cl_bit_for_bit(tmp_path: Path) -> None:
    alone = Toy(tmp_path / "a", sizes={"b": 12}).run()
    toy = Toy(tmp_path / "i", "i2cl", sizes={"b": 12})
    own = personal(toy.run(), toy.transport.states()["b"])
    assert equal(alone, own)
    assert torch.equal(own[VECTORS], Injected("b", 12).own_vectors())
    assert not torch.equal(own[COEFFICIENTS], start()[COEFFICIENTS])


def test_i2cl_sends_nothing_and_each_client_has_its_own(tmp_path: Path) -> None:
    toy = Toy(tmp_path, "i2cl")
    toy.run()
    assert not any(message.params or message.extra for message in [*toy.transport.sent, *toy.replies()])
    for client in SIZES:
        own = personal(start(), toy.transport.states()[client])
        assert torch.equal(own[VECTORS], Injected(client, 1).own_vectors())
    assert toy.collected == sorted(SIZES)


def test_a_client_with_few_examples_sends_no_vector_and_takes_part_after_that(tmp_path: Path) -> None:
    toy = Toy(tmp_path, min_examples=4)
    params = toy.run()
    assert torch.allclose(params[VECTORS], mean_vectors({"b": 1.0, "c": 1.0}), atol=1e-7)
    first, second = ([client["status"] for client in row["clients"]] for row in toy.rows()[:2])
    assert first == ["withheld", "ok", "ok"] and second == ["ok", "ok", "ok"]
    assert next(m for m in toy.replies() if m.client == "a").extra == {}
    assert equal(next(m for m in toy.replies() if m.client == "a").params, {COEFFICIENTS: start()[COEFFICIENTS]})


def test_c01_a_floor_that_no_client_reaches_is_refused_or_said_at_the_end(tmp_path: Path) -> None:
    toy = Toy(tmp_path, min_examples=100, settings=FederationSettings(algorithm="ifed-icl"))
    words = r"\[ifed-icl\] min-examples = 100, but the largest of the 3 clients has 12 training examples, .*: lower it"
    with pytest.raises(SettingsError, match=words):
        toy.run()
    toy.transport = Tampered(toy.endpoint, list(SIZES), toy.change)
    with pytest.raises(FednlError, match="None of the 4 rounds changed the rules"):
        toy.run()
    assert {row["reason"] for row in toy.rows()} == {WITHHELD}


def test_a_client_without_examples_gets_the_vectors_and_sends_none(tmp_path: Path) -> None:
    toy = Toy(tmp_path, sizes={**SIZES, "d": 0})
    params = toy.run()
    assert {client["status"] for row in toy.rows() for client in row["clients"] if client["name"] == "d"} == {"empty"}
    assert torch.equal(toy.transport.states()["d"][f"given/{VECTORS}"], params[VECTORS])
    assert torch.allclose(params[VECTORS], mean_vectors(dict.fromkeys(SIZES, 1.0)), atol=1e-7)


def test_a_client_that_was_not_asked_or_failed_gets_the_vectors_with_its_next_message(tmp_path: Path) -> None:
    toy = Toy(tmp_path, training=TRAINING.model_copy(update={"rounds": 8}))
    toy.settings = FederationSettings(clients_per_round=2)
    toy.change = lambda replies: [  # type: ignore[method-assign]
        Reply(r.client, b"", "failed", "OSError")
        if r.client == "b" and seen.append(1) is None and len(seen) == 2
        else r
        for r in replies
    ]
    seen: list[int] = []
    toy.run()
    carried = {client: [VECTORS in m.extra for m in toy.transport.sent if m.client == client] for client in SIZES}
    told: dict[str, bool] = dict.fromkeys(SIZES, False)
    for row in toy.rows():
        for client in row["clients"]:
            expected = row["round"] > 1 and not told[client["name"]]
            assert carried[client["name"]].pop(0) == expected
            told[client["name"]] = row["round"] > 1 and client["status"] == "ok"
    assert len(seen) > 2


def test_a_round_in_which_no_vector_came_is_taken_again(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    lost = iter([True])
    toy.change = lambda replies: (
        [  # type: ignore[method-assign]
            Reply(r.client, b"", "failed", "NonFiniteError") for r in replies
        ]
        if next(lost, False)
        else replies
    )
    params = toy.run()
    assert [row["updated"] for row in toy.rows()] == [False, True, True, True]
    assert [{c.get("steps", 0) for c in row["clients"]} for row in toy.rows()] == [{0}, {0}, {3}, {3}]
    assert torch.allclose(params[VECTORS], mean_vectors(dict.fromkeys(SIZES, 1.0)), atol=1e-7)


@pytest.mark.parametrize("found", [True, False])
def test_like_tasks_are_asked_for_once_after_the_first_round_of_coefficients(tmp_path: Path, found: bool) -> None:
    asked: list[torch.Tensor] = []
    theirs = torch.full((2, 2, 2), 0.25, dtype=torch.float64)

    def like(coefficients: torch.Tensor) -> torch.Tensor | None:
        asked.append(coefficients)
        return theirs if found else None

    plain, toy = Toy(tmp_path / "p"), Toy(tmp_path / "l")
    toy.algorithm.like = like  # type: ignore[attr-defined]
    ends = [plain.run(), toy.run()]
    first = [m.params[COEFFICIENTS] for m in plain.transport.sent if m.round == 3]
    assert len(asked) == 1 and torch.equal(asked[0], first[0])
    sent = {m.round: m.params[COEFFICIENTS] for m in toy.transport.sent}
    assert torch.equal(sent[3], theirs.float() if found else first[0])
    assert torch.equal(ends[0][VECTORS], ends[1][VECTORS])
    assert torch.equal(ends[0][COEFFICIENTS], ends[1][COEFFICIENTS]) is not found


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_run_has_the_same_bits_and_asks_for_no_vector_again(tmp_path: Path, stop: int) -> None:
    whole = Toy(tmp_path / "w").run()
    Toy(tmp_path / "r").run(stop_after=stop)
    again = Toy(tmp_path / "r")
    assert equal(again.run(), whole)
    assert again.collected == []


def test_a_forged_vector_is_refused_and_counted(tmp_path: Path) -> None:
    """After stage 1 nobody may send vectors, and in it none of another shape or with NaN in it."""
    toy = Toy(tmp_path)

    def forged(reply: Reply) -> Reply:
        message = Message.from_bytes(reply.payload)
        if reply.client != "b" or message.round > 2:
            return reply
        bad = torch.full((2, 2, 3), torch.nan) if message.round == 1 else torch.zeros(2, 2, 3)
        extra = {VECTORS: bad}
        message = Message(message.params, extra, message.num_examples, {}, message.round, "b", message.run)
        return Reply("b", message.to_bytes())

    toy.change = lambda replies: [forged(reply) for reply in replies]  # type: ignore[method-assign]
    params = toy.run()
    assert [row["refused"] for row in toy.rows()] == [{"non-finite": 1}, {"unknown-name": 1}, {}, {}]
    assert torch.allclose(params[VECTORS], mean_vectors({"a": 1.0, "c": 1.0}), atol=1e-7)


@pytest.mark.parametrize(("layers", "hidden", "most"), [(30, 576, 1200), (32, 4096, 1800)])
def test_a_round_of_coefficients_is_small_as_serialised(layers: int, hidden: int, most: int) -> None:
    """SmolLM2: 480 bytes of coefficients; Llama-3-8B: 512, at most 1.8 KB on the wire. Vectors once: 2 L h numbers."""
    coefficients = {COEFFICIENTS: torch.zeros(layers, 2, 2)}
    numbers = {
        "loss": 0.123456789012345,
        "loss_first": 0.1,
        "loss_last": 0.1,
        "seconds_s": 1.1,
        "cpu_s": 1.1,
        "steps": 8.0,
    }
    reply = Message(coefficients, {}, 5000, numbers, 10, "client-10", "run-of-some-name/arms/federated")
    assert coefficients[COEFFICIENTS].nbytes == 16 * layers <= 512
    assert reply.size_bytes <= most
    first = Message(coefficients, {VECTORS: torch.zeros(layers, 2, hidden)}, 5000, numbers, 1, "client-10", "run")
    assert 0 < first.size_bytes - 4 * 2 * layers * hidden <= most
