"""Tiny clients: a linear regression whose rules have the names and groups of real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.combine import WeightedMean
from fednl.federation.exchange import PLAIN, Exchange
from fednl.federation.local import LocalPlan
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, equal
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.sharing import take_part
from fednl.federation.transport import Endpoint, InProcessTransport, Reply
from fednl.runs import Run
from fednl.seeding import torch_rng

WRITE = "layers.0.memory.write.weight"
GATE = "layers.0.memory.gate.bias"
PROJECTION = "layers.1.memory.projection.down"
LORA_A, LORA_B = "layers.1.q_proj.lora_A", "layers.1.q_proj.lora_B"
LORA_RANK = 2
SIZES = {"ada": 5, "bob": 1, "cyd": 12, "dan": 7}
WIDTH = 3


def start_params(dtype: torch.dtype = torch.float32, lora: bool = False) -> Params:
    rng = torch_rng(7, "start")
    draw = {name: torch.randn(WIDTH, generator=rng, dtype=torch.float64) for name in (WRITE, PROJECTION)}
    if lora:
        draw |= {LORA_A: torch.randn(LORA_RANK, WIDTH, generator=rng, dtype=torch.float64)}
        draw |= {LORA_B: torch.zeros(1, LORA_RANK, dtype=torch.float64)}
    return {name: value.to(dtype) for name, value in {**draw, GATE: torch.zeros((), dtype=dtype)}.items()}


@dataclass(frozen=True)
class Regression:
    """Mean squared error of x . (write + projection + B A) + gate on a client's own data; B A if there is a LoRA."""

    client: str
    num_examples: int
    round: int = 1
    batch: int = 4
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        rng = torch_rng(self.seed, "data", self.client)
        x = torch.randn(self.num_examples, WIDTH, generator=rng, dtype=torch.float64)
        target = x @ torch.randn(WIDTH, generator=rng, dtype=torch.float64) + 0.5
        return x.to(self.dtype), target.to(self.dtype)

    def collect(self) -> Params:
        return {}

    def earlier(self, task: str) -> Regression:
        return replace(self, round=int(task.removeprefix("task-")))

    def loss(self, params: Params, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, target = batch
        weight = params[WRITE] + params[PROJECTION]
        if LORA_A in params:
            weight = weight + (params[LORA_B] @ params[LORA_A])[0]
        return (x @ weight + params[GATE] - target).square().mean()

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, target = self.data()
        rng = torch_rng(self.seed, purpose, self.client, self.round)
        for _ in range(steps):
            rows = torch.randperm(self.num_examples, generator=rng)[: size or self.batch]
            yield x[rows], target[rows]


@dataclass(frozen=True)
class Bowl:
    """The loss a/2 (w - b)^2 summed over elements, the same for every batch: all of it has closed forms."""

    centre: torch.Tensor
    curvature: float = 1.0
    num_examples: int = 1

    def collect(self) -> Params:
        return {}

    def loss(self, params: Params, batch: Any = None) -> torch.Tensor:
        return self.curvature / 2 * sum((w - self.centre).square().sum() for w in params.values())

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[None]:
        yield from [None] * steps


def descend(
    algorithm: FedAvg, problem: Any, received: Message, state: ClientState, lr: float, steps: int
) -> tuple[Message, ClientState]:
    """A client's round by plain gradient descent, where the library's loop would take AdamW's steps."""
    params, state = algorithm.start(received, state, problem)
    for batch in problem.batches("train", steps):
        grads = algorithm.gradient(params, batch, received, state, problem)
        after = {**params, **{name: params[name] - lr * grad for name, grad in grads.items()}}
        state = algorithm.after_step(params, after, grads, state)
        params = after
    return algorithm.finish(params, received, state, problem)


def rounds_of_descent(
    algorithm: FedAvg,
    problems: Mapping[str, Any],
    params: Params,
    rounds: int,
    lr: float,
    steps: int,
    lost: Collection[tuple[str, int]] = (),
) -> tuple[Params, ClientState, dict[str, ClientState]]:
    """Rounds of `descend` over all clients: the shared rules, the server's state, the clients' states.

    A reply that is lost, by client and round, leaves its client's state as after any other.
    """
    counted: dict[str, int] = {}
    server: ClientState = {}
    states: dict[str, ClientState] = {client: {} for client in problems}
    for round in range(1, rounds + 1):
        beside, mean, extra = algorithm.broadcast(params, server), WeightedMean(), WeightedMean()
        for client, problem in sorted(problems.items()):
            told = algorithm.to_client(beside, client, server, counted.get(client, 0))
            received = Message(params, told, round=round)
            reply, states[client] = descend(algorithm, problem, received, states[client], lr, steps)
            if (client, round) in lost:
                continue
            counted[client] = round
            mean.add(reply.params, reply.num_examples)
            extra.add(reply.extra, reply.num_examples)
        combined = Message(mean.result(), extra.result(), num_examples=int(mean.weight), round=round)
        params, server = algorithm.server_step(params, combined, server)
    return params, server, states


def toy_endpoint(
    algorithm: FedAvg,
    training: TrainingSettings,
    sizes: Mapping[str, int],
    dtype: torch.dtype = torch.float32,
    task_rounds: int = 0,
    exchange: Exchange = PLAIN,
) -> Endpoint:
    def endpoint(
        client: str, message: Message, state: ClientState, on_progress: Callable[[dict[str, Any]], None]
    ) -> tuple[Message, ClientState]:
        problem = Regression(client, sizes[client], message.round, training.batch, dtype=dtype)
        last = math.ceil(message.round / task_rounds) * task_rounds if task_rounds else 0
        task = f"task-{last}" if last else ""
        ends = task if last == message.round else ""
        plan = LocalPlan.of(training, message.round, task, ends, final=bool(ends))
        return take_part(algorithm, problem, message, state, plan, exchange, on_progress)

    return endpoint


class Tampered(InProcessTransport):
    """Lets a test change what comes back: the order, the bytes, the number of replies."""

    def __init__(
        self,
        endpoint: Endpoint,
        clients: Mapping[str, int] | Iterable[str],
        change: Callable[[list[Reply]], list[Reply]],
    ) -> None:
        super().__init__(endpoint, clients)
        self.change = change
        self.sent: list[Message] = []
        self.returned: list[Reply] = []

    def send(self, client: str, message: Message) -> int:
        size = super().send(client, message)
        self.sent.append(Message.from_bytes(self._asked[client]))
        assert len(self._asked[client]) == size
        return size

    def replies(self, deadline_s: float | None, on_progress: Any = None) -> Iterator[Reply]:
        came = self.change(list(super().replies(deadline_s, on_progress)))
        self.returned += came
        yield from came


def forge(reply: Reply, **fields: Any) -> Reply:
    """The same reply with some fields of its message changed."""
    message = replace(Message.from_bytes(reply.payload), **fields)
    return replace(reply, payload=message.to_bytes())


def own_settings(kind: str) -> Any:
    """An algorithm's settings that fit the toys' LoRA."""
    return ALGORITHMS[kind].Settings(**({"merged_rank": 1} if kind == "flora" else {}))


@dataclass
class Bench:
    """One toy federation, ready to run."""

    path: Path
    sizes: Mapping[str, int] = field(default_factory=lambda: dict(SIZES))
    algorithm: FedAvg = field(default_factory=lambda: FedAvg(shared="theta"))
    settings: FederationSettings = field(default_factory=FederationSettings)
    training: TrainingSettings = field(default_factory=lambda: TrainingSettings(rounds=3, local_steps=3, batch=4))
    seed: int = 3
    dtype: torch.dtype = torch.float32
    lora: bool = False
    task_rounds: int = 0
    """Rounds after which a task ends; 0 for one task without an end."""
    exchange: Exchange = PLAIN
    events: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def run_folder(self) -> Run:
        self.path.mkdir(parents=True, exist_ok=True)
        return Run(self.path)

    def endpoint(self) -> Endpoint:
        return toy_endpoint(self.algorithm, self.training, self.sizes, self.dtype, self.task_rounds, self.exchange)

    def transport(self, change: Callable[[list[Reply]], list[Reply]] = lambda replies: replies) -> Tampered:
        return Tampered(self.endpoint(), self.sizes, change)

    def run(self, transport: Any = None, **named: Any) -> Params:
        from fednl.federation.loop import run_rounds

        named.setdefault("on_event", self.events.append)
        named.setdefault("exchange", self.exchange)
        return run_rounds(
            self.algorithm,
            transport or self.transport(),
            start_params(self.dtype, self.lora),
            self.settings,
            self.training,
            self.run_folder,
            seed=self.seed,
            **named,
        )

    def rows(self) -> list[dict[str, Any]]:
        return self.run_folder.read_jsonl("rounds.jsonl")


def in_parts(whole: Bench, parts: Bench, stops: Sequence[int]) -> tuple[Tampered, Tampered]:
    """Runs the one at once and the other in parts, and checks that rules and clients' own parts are equal to the bit.

    Returns:
        The transports of the whole run and of the last part.
    """
    first = whole.transport()
    expected = whole.run(first)
    for after in stops:
        parts.run(stop_after=after)
    second = parts.transport()
    assert equal(parts.run(second), expected)
    for client in whole.sizes:
        assert equal(first.states()[client], second.states()[client])
    return first, second


def plain_training(problem_of: Callable[[int], Regression], training: TrainingSettings, names: Iterable[str]) -> Params:
    """The oracle of local training: one AdamW loop over all rounds, written without the library's loop."""
    names = sorted(names)
    start = start_params(problem_of(1).dtype, lora=LORA_B in names)
    leaves = {name: torch.nn.Parameter(start[name].clone()) for name in names}
    optimizer = torch.optim.AdamW(leaves.values(), lr=training.local_lr, weight_decay=0.0)
    done, total = 0, training.rounds * training.local_steps
    for round in range(1, training.rounds + 1):
        problem = problem_of(round)
        for batch in problem.batches("train", training.local_steps):
            optimizer.zero_grad()
            problem.loss({**start, **leaves}, batch).backward()
            torch.nn.utils.clip_grad_norm_(leaves.values(), training.clip)
            rate = training.local_lr
            if done < training.warmup_steps:
                rate *= (done + 1) / training.warmup_steps
            elif training.schedule == "cosine":
                share = (done - training.warmup_steps) / (total - training.warmup_steps)
                rate *= 0.5 * (1 + math.cos(math.pi * share))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            done += 1
    return {**start, **{name: leaf.detach() for name, leaf in leaves.items()}}
