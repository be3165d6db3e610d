"""Algorithms for a stream of tasks, EWC and FedSSI: what they measure at a task's end, and what it then holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import SIZES, Bench, Bowl, Regression, Tampered, descend, in_parts, start_params
from pydantic import ValidationError

from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.algorithms.ewc import Ewc, EwcSettings
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.fedssi import FedSsi, FedSsiSettings
from fednl.federation.checkpoint import load_newest
from fednl.federation.combine import WeightedMean
from fednl.federation.local import LocalPlan, train_locally
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, equal
from fednl.federation.settings import TrainingSettings
from fednl.federation.transport import Endpoint, InProcessTransport

KINDS = ["ewc", "fedssi"]


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ewc(**fields: Any) -> Ewc:
    return Ewc(EwcSettings(**fields), "all")


def ssi(**fields: Any) -> FedSsi:
    return FedSsi(FedSsiSettings(**fields), "all")


@dataclass(frozen=True)
class Gaussian:
    """The negative log-likelihood of numbers under a Gaussian with the mean w: its Fisher information is 1/sigma^2."""

    numbers: tuple[float, ...]
    sigma: float = 1.0

    @property
    def num_examples(self) -> int:
        return len(self.numbers)

    def loss(self, params: Params, batch: tuple[float, ...]) -> torch.Tensor:
        drawn = torch.tensor(batch, dtype=torch.float64)
        return ((params["w"][:, None] - drawn).square() / (2 * self.sigma**2)).mean(1).sum()

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[tuple[float, ...]]:
        size = size or len(self.numbers)
        for step in range(steps):
            first = step * size % len(self.numbers)
            yield self.numbers[first : first + size]


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_ewcs_importance_is_a_gaussians_fisher_information(sigma: float) -> None:
    # One example above and one below the mean: gradients of both signs, each squared by itself.
    problem = Gaussian((3.0 + sigma, 3.0 - sigma), sigma)
    params = {"w": numbers(3.0)}
    state = ewc().boundary("first", params, {}, problem)
    torch.testing.assert_close(state["importance/w"], numbers(1 / sigma**2), rtol=0, atol=1e-15)
    assert torch.equal(state["anchor/w"], params["w"])
    # Away from the optimum the empirical Fisher has the squared mean gradient on top.
    away = ewc().boundary("first", {"w": numbers(4.0)}, {}, problem)
    expected = 1 / sigma**2 + (1 / sigma**2) ** 2
    torch.testing.assert_close(away["importance/w"], numbers(expected), rtol=0, atol=1e-14)


def test_ewc_measures_on_no_more_examples_than_asked_and_than_there_are() -> None:
    problem = Gaussian((1.0, 7.0, -8.0))
    first = ewc(fisher_examples=1).boundary("t", {"w": numbers(0.0)}, {}, problem)
    assert float(first["importance/w"]) == 1.0
    all_of_them = ewc(fisher_examples=64).boundary("t", {"w": numbers(0.0)}, {}, problem)
    assert float(all_of_them["importance/w"]) == pytest.approx((1 + 49 + 64) / 3, abs=1e-14)


def test_ewcs_importance_adds_up_over_tasks_and_the_anchor_moves() -> None:
    algorithm = ewc(decay=0.25)
    state = algorithm.boundary("first", {"w": numbers(3.0)}, {}, Gaussian((4.0, 2.0)))
    state = algorithm.boundary("second", {"w": numbers(-1.0)}, state, Gaussian((1.0, -3.0), 2.0))
    assert float(state["importance/w"]) == pytest.approx(0.25 * 1 + 1 / 4, abs=1e-15)
    assert float(state["anchor/w"]) == -1.0


@pytest.mark.parametrize("away", [2.0, -2.0])
def test_a_held_rule_settles_between_the_old_task_and_the_new(away: float) -> None:
    old, new, curvature = numbers(1.0, 1.0), numbers(1.0 + away, 1.0 + away), 0.75
    state = {"importance/w": numbers(0.5, 0.0), "anchor/w": old}
    for algorithm, weight in ((ewc(strength=3.0), 3.0 * 0.5), (ssi(strength=3.0), 2 * 3.0 * 0.5)):
        reply, after = descend(algorithm, Bowl(new, curvature), Message({"w": old}), state, 0.1, 800)
        held = (curvature * new[0] + weight * old[0]) / (curvature + weight)
        expected = torch.stack([held, new[1]])  # what did not matter is free
        torch.testing.assert_close(reply.params["w"], expected, rtol=0, atol=1e-10)
        assert equal({n: after[n] for n in state}, state)


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_tasks_end_and_at_the_anchor_there_is_no_pull(kind: str) -> None:
    algorithm, params = ALGORITHMS[kind](shared="all"), {"w": numbers(1.0)}
    assert algorithm.penalty(params, Message(params), {}) == 0
    state = {"importance/w": numbers(5.0), "anchor/w": params["w"]}
    grads = algorithm.gradient(params, None, Message(params), state, Bowl(numbers(4.0)))
    assert float(grads["w"]) == -3.0


@pytest.mark.parametrize("away", [3.0, -3.0])
@pytest.mark.parametrize("locality", [0.1, 0.5, 1.0])
def test_fedssis_surrogate_and_its_path_in_closed_form(locality: float, away: float) -> None:
    curvature, lr, steps, xi, start = 2.0, 0.05, 40, 0.1, 1.0
    q = (1 - locality) / (2 * locality)
    assert q == pytest.approx({0.1: 4.5, 0.5: 0.5, 1.0: 0.0}[locality], abs=1e-12)
    algorithm = ssi(locality=locality, surrogate_steps=steps, surrogate_lr=lr, xi=xi)
    bowl, begun = Bowl(numbers(start + away), curvature), {"start/w": numbers(start)}
    state = algorithm.boundary("first", {"w": numbers(99.0)}, begun, bowl)
    # v goes the part 1 - r^n of the way to its fixed point, which lies the part a / (a + q) towards the data.
    part, r = curvature / (curvature + q), 1 - lr * (curvature + q)
    moved = part * away * (1 - r**steps)
    path = 0.0
    for step in range(steps):
        before, after = part * away * (1 - r**step), part * away * (1 - r ** (step + 1))
        path += -curvature * (before - away) * (after - before)
    expected = path / (moved**2 + xi)
    torch.testing.assert_close(state["importance/w"], numbers(expected), rtol=1e-12, atol=0)
    assert expected > 0
    assert "anchor/w" not in state  # that comes with the next round


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task_rounds", [1, 3])
@pytest.mark.parametrize("centre", [2.0, -2.0])
def test_a_second_task_without_gradient_leaves_the_first_as_it_was_learned(
    kind: str, task_rounds: int, centre: float
) -> None:
    algorithm = ALGORITHMS[kind](ALGORITHMS[kind].Settings(strength=10.0), "all")
    params: Params = {"w": numbers(0.0)}
    states: dict[str, Params] = {"ada": {}, "bob": {}}
    for round in range(1, 2 * task_rounds + 1):
        curvature = 1.0 if round <= task_rounds else 0.0
        bowls = {"ada": Bowl(numbers(centre), curvature), "bob": Bowl(numbers(centre / 2), curvature)}
        received, mean = Message(params, round=round), WeightedMean()
        for client, bowl in bowls.items():
            at, state = algorithm.start(received, states[client], bowl)
            for _ in range(60):
                grads = algorithm.gradient(at, None, received, state, bowl)
                at = {"w": at["w"] - 0.1 * grads["w"]}
            if round % task_rounds == 0:
                state = algorithm.boundary("t", at, state, bowl)
            reply, states[client] = algorithm.finish(at, received, state, bowl)
            mean.add(reply.params, 1)
        params = mean.result()
        if round == task_rounds:
            learned = float(params["w"])
    assert learned == pytest.approx(0.75 * centre, rel=0.01)
    # FedSSI holds what the clients together made of the task; EWC what each did, whose mean it is.
    assert float(params["w"]) == pytest.approx(learned, rel=0.02)
    if kind == "fedssi":
        _, state = algorithm.start(Message(params), states["ada"], bowls["ada"])
        assert torch.equal(state["anchor/w"], params["w"])


def test_fedssis_anchor_is_what_the_round_after_a_task_began_with_until_the_next_task_ends() -> None:
    algorithm, bowl, state, anchors = ssi(), Bowl(numbers(2.0)), dict[str, torch.Tensor](), []
    for round, sent in enumerate((0.0, 1.0, 5.0, 6.0, 8.0, 9.0), 1):  # three tasks of two rounds
        received = Message({"w": numbers(sent)}, round=round)
        params, state = algorithm.start(received, state, bowl)
        anchors.append(float(state.get("anchor/w", numbers(-1.0))))
        if round % 2 == 0:
            state = algorithm.boundary(f"task {round}", params, state, bowl)
            assert "anchor/w" not in state
        _, state = algorithm.finish(params, received, state, bowl)
    assert anchors == [-1.0, -1.0, 5.0, 5.0, 8.0, 8.0]


def test_a_surrogates_path_sums_to_the_drop_of_the_loss() -> None:
    bowl, start = Bowl(numbers(2.0, -1.0, 0.5), 1.7), {"w": numbers(0.0, 1.0, 0.5)}
    algorithm = ssi(locality=1.0, surrogate_steps=5000, surrogate_lr=2e-3)
    state = algorithm.boundary("t", start, {"start/w": start["w"]}, bowl)
    # The loss falls to 0 here, and v ends at the centre.
    path = state["importance/w"] * ((bowl.centre - start["w"]).square() + 0.1)
    assert float(path.sum()) == pytest.approx(float(bowl.loss(start)), rel=2e-3)
    assert float(path[2]) == 0.0  # a rule that the task does not move


@dataclass(frozen=True)
class Slope:
    """A loss that falls evenly: the gradient is the same everywhere."""

    slope: float

    def loss(self, params: Params, batch: None) -> torch.Tensor:
        return -self.slope * params["w"].sum()

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[None]:
        yield from [None] * steps


def test_fedssis_importance_is_never_negative_where_rounding_makes_the_path_so() -> None:
    """As near to divergence as the settings allow: two steps of one length, there and back, whose parts cancel."""
    algorithm = ssi(locality=0.1, surrogate_steps=2, surrogate_lr=2 / 4.5 * (1 - 1e-8))
    problem, start = Slope(3.3), torch.zeros(1)
    assert float(algorithm.boundary("t", {"w": start}, {"start/w": start}, problem)["importance/w"]) == 0.0  # type: ignore[arg-type]
    # The same sum by hand, in the same order and precision.
    first = torch.tensor(3.3) * algorithm.settings.surrogate_lr
    second = -algorithm.settings.surrogate_lr * (torch.tensor(-3.3) + 4.5 * first)
    assert float(3.3 * first + 3.3 * second) < 0, "the case is not trivial"


def test_fedssis_importance_adds_up_over_tasks() -> None:
    calm = ssi()
    first = calm.boundary("a", {"w": numbers(0.0)}, {"start/w": numbers(0.0)}, Bowl(numbers(1.0)))
    again = calm.boundary("b", {"w": numbers(0.0)}, {**first, "start/w": numbers(0.0)}, Bowl(numbers(1.0)))
    assert float(again["importance/w"]) == pytest.approx(2 * float(first["importance/w"]), rel=1e-15)


@dataclass(frozen=True)
class Saddle:
    """A loss whose gradient in one rule depends on the other, with a minimum in no direction."""

    def loss(self, params: Params, batch: int) -> torch.Tensor:
        w = params["w"]
        return 3 * w[0] * w[1] - w[0].square() + (batch - 1.5) * (w[0] - 2 * w[1])

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[int]:
        yield from range(steps)


@pytest.mark.parametrize(("locality", "lr"), [(0.1, 0.4), (0.5, 0.1), (1.0, 0.05)])
def test_a_surrogates_path_is_the_way_it_is_pulled_and_the_squares_of_its_changes(locality: float, lr: float) -> None:
    """Which is above zero for each rule, whatever the gradients, as long as the pull itself converges."""
    algorithm, problem, u = ssi(locality=locality, surrogate_steps=7, surrogate_lr=lr), Saddle(), numbers(0.3, -0.2)
    q, v, squares = algorithm.settings.surrogate_pull, u, numbers(0.0, 0.0)
    for batch in range(7):
        gradient = numbers(3 * v[1] - 2 * v[0] + batch - 1.5, 3 * v[0] - 2 * (batch - 1.5))
        change = -lr * (gradient + q * (v - u))
        v, squares = v + change, squares + change.square()
    path = q / 2 * (v - u).square() + (1 / lr - q / 2) * squares
    state = algorithm.boundary("t", {"w": u}, {"start/w": u}, problem)  # type: ignore[arg-type]
    torch.testing.assert_close(state["importance/w"], path / ((v - u).square() + 0.1), rtol=1e-12, atol=0)


def stream(path: Path, algorithm: FedAvg, task_rounds: int) -> Bench:
    return Bench(path, algorithm=algorithm, task_rounds=task_rounds, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_with_one_task_it_is_fedavg_to_the_bit_and_with_two_it_is_not(kind: str, tmp_path: Path) -> None:
    settings = ALGORITHMS[kind].Settings(strength=1000.0)
    plain = stream(tmp_path / "plain", FedAvg(shared="memory"), 0)
    expected = plain.run()
    for task_rounds, same in ((0, True), (3, True), (1, False)):  # of three rounds
        toy = stream(tmp_path / str(task_rounds), ALGORITHMS[kind](settings, "memory"), task_rounds)
        transport = toy.transport()
        assert equal(toy.run(transport), expected) == same
        names = {name.split("/")[0] for state in transport.states().values() for name in state}
        assert ("importance" in names) == bool(task_rounds)
        assert "start" not in names


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_tasks_resumes_to_the_bit_and_sends_rules_only(kind: str, tmp_path: Path) -> None:
    whole = stream(tmp_path / "a", ALGORITHMS[kind](shared="memory"), 1)
    parts = stream(tmp_path / "b", ALGORITHMS[kind](shared="memory"), 1)
    first, _ = in_parts(whole, parts, (1, 2))
    assert all(Message.from_bytes(reply.payload).extra == {} for reply in first.returned)


@pytest.mark.parametrize("kind", [*KINDS, "fedweit"])
def test_a_client_that_fails_in_a_tasks_last_round_ends_it_in_the_next_round_it_takes_part_in(
    kind: str, tmp_path: Path
) -> None:
    toy = stream(tmp_path / "r", ALGORITHMS[kind](shared="memory"), 2)
    toy.training = TrainingSettings(rounds=4, local_steps=2)
    healthy = toy.endpoint()

    def endpoint(client: str, message: Message, state: ClientState, tell: Any) -> tuple[Message, ClientState]:
        if client == "ada" and message.round == 2:
            raise OSError("disk")
        return healthy(client, message, state, tell)

    transport = InProcessTransport(endpoint, SIZES)
    toy.run(transport, stop_after=3)
    states = transport.states()
    late = {"owed/task-2"} if kind == "fedweit" else set()  # sent in this round, and not yet said to have counted
    assert set(states["ada"]) == set(states["bob"]) | late and "open/task-4" in states["ada"]
    toy.run(transport)
    states = transport.states()
    assert set(states["ada"]) == set(states["bob"]) and not any(name.startswith("open/") for name in states["ada"])
    assert [row["status"] for row in toy.rows()[1]["clients"]] == ["failed", "ok", "ok", "ok"]


def client_rounds(kind: str, plans: list[LocalPlan]) -> list[tuple[Message, ClientState]]:
    """What one client sends and keeps after each of these rounds."""
    algorithm, state, found = ALGORITHMS[kind](shared="memory"), dict[str, torch.Tensor](), []
    start = start_params(torch.float64)
    shared = {name: start[name] for name in algorithm.shared(start)}
    state = {f"private/{name}": start[name] for name in start if name not in shared}
    for plan in plans:
        received = Message({name: t + plan.round / 8 for name, t in shared.items()}, round=plan.round, client="cyd")
        problem = Regression("cyd", 12, plan.round, dtype=torch.float64)
        message, state = train_locally(algorithm, problem, received, state, plan)
        found.append((message, state))
    return found


@pytest.mark.parametrize("kind", [*KINDS, "fedweit"])
@pytest.mark.parametrize("foreseen", [["t", "", "t"], ["t", "t", "t"], ["", "t", "t"]])
def test_a_task_that_ended_and_goes_on_against_that_ends_as_if_it_had_been_known(
    kind: str, foreseen: list[str]
) -> None:
    """A client foresees its last round; where others are in quarantine it is asked once more."""

    def plans(ends: list[str]) -> list[LocalPlan]:
        first = [LocalPlan(n, 2, 0.05, task="t", ends=end, final=n == 3) for n, end in enumerate(ends, 1)]
        return [*first, LocalPlan(4, 2, 0.05, task="u"), LocalPlan(5, 2, 0.05, task="u", ends="u", final=True)]

    surprised, knew = client_rounds(kind, plans(foreseen)), client_rounds(kind, plans(["", "", "t"]))
    for number in (3, 4, 5):
        message, state = surprised[number - 1]
        assert equal(state, knew[number - 1][1])
        assert equal(message.params, knew[number - 1][0].params) and equal(message.extra, knew[number - 1][0].extra)
    ended = surprised[foreseen.index("t")][1]
    assert "closed/t" in ended and any(name.startswith("undo/") for name in ended)
    assert not any(name.startswith("undo/") for name in surprised[2][1]), "no round of the task is left"
    assert "open/u" in surprised[3][1] and "closed/t" not in surprised[3][1]


@pytest.mark.parametrize("kind", [*KINDS, "fedweit"])
def test_what_has_ended_for_good_does_not_end_again(kind: str) -> None:
    plans = [LocalPlan(n, 2, 0.05, task="t", ends="t", final=True) for n in (1, 2)]
    (_, once), (_, twice) = client_rounds(kind, plans)
    held = [name for name in once if name.startswith(("importance/", "task/")) and "/adaptive/" not in name]
    assert held and equal({name: once[name] for name in held}, {name: twice[name] for name in held})
    assert "closed/t" in twice


@dataclass
class Surprised(Bench):
    """All clients foresee that a task's last round but one is their last."""

    def endpoint(self) -> Endpoint:
        def endpoint(client: str, message: Message, state: ClientState, tell: Any) -> tuple[Message, ClientState]:
            left = -message.round % self.task_rounds
            task = f"task-{message.round + left}"
            problem = Regression(client, self.sizes[client], message.round, self.training.batch, dtype=self.dtype)
            ends = task if left < 2 else ""
            plan = LocalPlan.of(self.training, message.round, task, ends, final=not left)
            return train_locally(self.algorithm, problem, message, state, plan)

        return endpoint


@pytest.mark.parametrize("kind", [*KINDS, "fedweit"])
def test_tasks_that_end_sooner_than_they_should_resume_to_the_bit_and_change_nothing(kind: str, tmp_path: Path) -> None:
    named = {"task_rounds": 3, "dtype": torch.float64, "training": TrainingSettings(rounds=7, local_steps=2)}
    knew, whole, parts = (
        made(tmp_path / name, algorithm=ALGORITHMS[kind](shared="memory"), **named)
        for name, made in (("knew", Bench), ("whole", Surprised), ("parts", Surprised))
    )
    transport = knew.transport()
    expected = knew.run(transport)
    first, _ = in_parts(whole, parts, (2, 5))
    assert equal(Message.from_bytes(first.returned[-1].payload).params, _last(transport))
    newest = load_newest(whole.path / "checkpoints")
    assert newest is not None and equal(newest.params, expected)
    for client, state in transport.states().items():
        assert equal(first.states()[client], state)


def _last(transport: Tampered) -> Params:
    return Message.from_bytes(transport.returned[-1].payload).params


def test_what_a_task_that_ended_late_is_measured_on_is_its_own_data() -> None:
    # Two tasks around unlike centres: the Fisher information at 0 is the squared centre.
    @dataclass(frozen=True)
    class Centred(Bowl):
        def earlier(self, task: str) -> Bowl:
            return Bowl(numbers({"first": 3.0}[task]))

    plan = LocalPlan(round=2, steps=1, lr=0.0, task="second")
    _, state = train_locally(
        ewc(), Centred(numbers(7.0)), Message({"w": numbers(0.0)}), {"open/first": numbers(1)}, plan
    )
    assert float(state["importance/w"]) == 9.0 and float(state["anchor/w"]) == 0.0
    assert {name for name in state if name.startswith("open/")} == {"open/second"}


def test_a_client_without_examples_ends_a_task_unmoved(tmp_path: Path) -> None:
    toy = replace(stream(tmp_path / "r", ewc(), 1), sizes={"ada": 4, "bob": 0})
    transport = toy.transport()
    toy.run(transport)
    assert {row["status"] for r in toy.rows() for row in r["clients"]} == {"ok", "empty"}
    assert transport.states()["bob"] == {}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ewc", {"strength": -1.0}),
        ("ewc", {"decay": 1.5}),
        ("ewc", {"fisher-examples": 0}),
        ("fedssi", {"locality": 0.0}),
        ("fedssi", {"locality": 1.1}),
        ("fedssi", {"xi": 0.0}),
        ("fedssi", {"surrogate-lr": 0.0}),
    ],
)
def test_refuses(kind: str, fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ALGORITHMS[kind].Settings.model_validate(fields)
