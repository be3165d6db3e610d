"""The one local training loop: what a client does in a round, whatever the algorithm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fednl.errors import DataError, MessageError
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, copy, finite
from fednl.federation.settings import TrainingSettings
from fednl.federation.task_ends import TaskEnds

if TYPE_CHECKING:
    from fednl.federation.algorithms.fedavg import FedAvg

OnProgress = Callable[[dict[str, Any]], None]
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Problem(Protocol):
    """A client's data and loss, as an algorithm sees them."""

    @property
    def num_examples(self) -> int:
        """Trainable examples in the client's training split."""
        ...

    def collect(self) -> Params:
        """Gives what an adapter reads off the client's training examples without training, by the names of rules."""
        ...

    def earlier(self, task: str) -> Problem:
        """Gives the same client's data of an earlier task of its stream."""
        ...

    def loss(self, params: Params, batch: Any) -> torch.Tensor:
        """Gives the mean loss of a batch, a scalar differentiable with respect to `params`."""
        ...

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[Any]:
        """Gives `steps` batches, the same ones for the same (seed, client, round, purpose).

        Args:
            purpose: names the random stream; another purpose gives other batches.
            steps: how many.
            size: examples a batch; 0 for the run's own. Within a pass no example comes twice.
        """
        ...


@dataclass(frozen=True)
class LocalPlan:
    """What a client is to do in one round.

    Args:
        round: counted from 1.
        steps: optimiser steps in this round.
        lr: AdamW's learning rate before the schedule.
        schedule: `"constant"` or `"cosine"`.
        warmup_steps: first steps of the run with a rising rate.
        total_steps: a client's steps over all rounds of the run.
        optimizer_state: `"keep"` or `"reset"`.
        clip: largest L2 norm of a step's gradient; 0 for no limit.
        task: the name of the round's task in a stream of tasks; empty for none.
        ends: the same name where the task ends with this round; else empty.
        final: whether the task has no round left in which the client might be asked after all.
    """

    round: int
    steps: int
    lr: float
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    optimizer_state: str = "keep"
    clip: float = 1.0
    task: str = ""
    ends: str = ""
    final: bool = False

    @classmethod
    def of(
        cls, training: TrainingSettings, round: int, task: str = "", ends: str = "", final: bool = False
    ) -> LocalPlan:
        """Gives the plan of a round, counted from 1, under a `[training]` section; the others as in the class."""
        return cls(
            round=round,
            steps=training.local_steps,
            lr=training.local_lr,
            schedule=training.schedule,
            warmup_steps=training.warmup_steps,
            total_steps=training.rounds * training.local_steps,
            optimizer_state=training.optimizer_state,
            clip=training.clip,
            task=task,
            ends=ends,
            final=final,
        )


def learning_rate(plan: LocalPlan, step: int) -> float:
    """Gives the learning rate of a step; the schedule runs over the whole run, not anew in each round.

    Args:
        plan: the round's plan.
        step: the step within the round, counted from 0.

    Source: linear warm-up, then constant or half a cosine (SGDR, arXiv 1608.03983, eq. 5).
    """
    done = (plan.round - 1) * plan.steps + step
    if done < plan.warmup_steps:
        return plan.lr * (done + 1) / plan.warmup_steps
    if plan.schedule == "constant":
        return plan.lr
    share = (done - plan.warmup_steps) / max(1, plan.total_steps - plan.warmup_steps)
    return plan.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


def train_locally(
    algorithm: FedAvg,
    problem: Problem,
    received: Message,
    state: ClientState,
    plan: LocalPlan,
    on_step: OnProgress | None = None,
    fewest: int = 1,
) -> tuple[Message, ClientState]:
    """Does a client's part of a round: starts from what came, takes its steps, says what it sends and keeps.

    Args:
        algorithm: whose hooks are called.
        problem: the client's data and loss.
        received: the server's message; its params are the shared rules. Not modified.
        state: what the client kept from earlier rounds. Not modified.
        plan: steps, rate, schedule, clipping.
        on_step: is told `{"step", "steps", "loss"}` after every step.
        fewest: with fewer examples than this, at least 1, a client shares nothing.

    Returns:
        The reply, and the state for the next round. A client without examples replies with what it received,
        as `"empty"`, and one with too few as `"withheld"`. If training left a NaN, the reply carries it, for the
        server to refuse and count, but the state is the one from before the round: one bad round does not spoil the
        client for good.

    Raises:
        MessageError: code `unknown-name`; the server sent, or the algorithm would send, what is not shared.
        DataError: the client has examples, but its data gave no batch.
    """
    _check_allowed(algorithm, received)
    if given := algorithm.given(received.extra):
        state = {**state, **{f"given/{name}": received.extra[name].clone() for name in given}}
    if problem.num_examples < fewest:
        params, extra = copy(algorithm.returns(received.params)), copy(algorithm.extra(received.params))
        extra = {name: tensor for name, tensor in extra.items() if name not in algorithm.apart(extra)}
        status = "withheld" if problem.num_examples else "empty"
        return replace(received, params=params, extra=extra, num_examples=0, metrics={}, status=status), state
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    watched = _Watched(problem)
    tasks = TaskEnds(algorithm, problem, received, state, plan)
    params, new_state = algorithm.start(received, tasks.begun, watched)
    steps = algorithm.steps(new_state, plan.steps)
    optimizer = _AdamW(params, algorithm.trainable(params), new_state, plan)
    losses: list[float] = []
    watched.take()  # a loss that the algorithm looked at before the first step is not a step's
    for step, batch in enumerate(problem.batches("train", steps)):
        grads = algorithm.gradient(params, batch, received, new_state, watched)
        moved = {**params, **optimizer.step(grads, learning_rate(plan, step))}
        new_state = algorithm.after_step(params, moved, grads, new_state)
        params = moved
        losses.append(watched.take())
        if on_step is not None:
            on_step({"step": step + 1, "steps": steps, "loss": losses[-1]})
    if steps and not losses:
        raise DataError(f'Client "{received.client}" has {problem.num_examples} examples but gave no batch.')
    still_open = None
    if tasks.may_reopen:
        still_open = algorithm.finish(params, received, optimizer.kept(new_state), watched)[1]
    if tasks.ends:
        new_state = algorithm.boundary(tasks.ends, params, new_state, watched)
    message, new_state = algorithm.finish(params, received, optimizer.kept(new_state), watched)
    new_state = tasks.noted(new_state, still_open)
    spent = {"seconds_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s}
    message = _signed(message, received, losses, spent)
    _check_allowed(algorithm, message)
    healthy = finite(message.params) and finite(new_state)
    return message, new_state if healthy else state


def _signed(message: Message, received: Message, losses: list[float], spent: Mapping[str, float]) -> Message:
    """The reply with the question it answers and what was measured."""
    metrics = {**message.metrics, "steps": float(len(losses)), **spent}
    if losses:
        metrics |= {"loss": sum(losses) / len(losses), "loss_first": losses[0], "loss_last": losses[-1]}
    message = replace(message, round=received.round, client=received.client, run=received.run)
    return replace(message, metrics=metrics, attempt=received.attempt)


def _check_allowed(algorithm: FedAvg, message: Message) -> None:
    """The client's own allow-list, so that neither a server nor an algorithm gets at what is private."""
    stray = len(set(message.params) - set(algorithm.shared(message.params)))
    stray += len(set(message.extra) - set(algorithm.extra(message.params)) - set(algorithm.given(message.extra)))
    if stray:
        raise MessageError(
            "unknown-name",
            f"A message with {stray} tensors that [federation] shared does not let out is refused.",
        )


class _Watched:
    """A problem that remembers the first loss since the last look: the data's loss, without any penalty."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._loss: torch.Tensor | None = None

    @property
    def num_examples(self) -> int:
        return self._problem.num_examples

    def collect(self) -> Params:
        return self._problem.collect()

    def earlier(self, task: str) -> Problem:
        return self._problem.earlier(task)

    def loss(self, params: Params, batch: Any) -> torch.Tensor:
        loss = self._problem.loss(params, batch)
        if self._loss is None:
            self._loss = loss.detach()
        return loss

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[Any]:
        return self._problem.batches(purpose, steps, size)

    def take(self) -> float:
        loss, self._loss = self._loss, None
        return math.nan if loss is None else float(loss)


class _AdamW:
    """torch's AdamW without weight decay, with its moments going in from a ClientState and out into one."""

    def __init__(self, params: Params, moved: list[str], state: ClientState, plan: LocalPlan) -> None:
        self._plan = plan
        self._leaves = copy({name: params[name] for name in moved})
        self._optimizer = torch.optim.AdamW(self._leaves.values(), plan.lr, weight_decay=0.0) if moved else None
        if plan.optimizer_state == "keep" and "optimizer/step" in state:
            for name, leaf in self._leaves.items():
                self._restore(name, leaf, state)

    def step(self, grads: Params, lr: float) -> Params:
        """Gives the moved tensors after one clipped step; new ones each time."""
        if self._optimizer is None:
            return {}
        for name, leaf in self._leaves.items():
            leaf.grad = grads[name].clone()
        if self._plan.clip > 0:
            torch.nn.utils.clip_grad_norm_(self._leaves.values(), self._plan.clip)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        return copy(self._leaves)

    def kept(self, state: ClientState) -> ClientState:
        """Gives the state with these moments in it, or without any if they are not to be kept."""
        others = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer/")}
        if self._optimizer is None or self._plan.optimizer_state == "reset":
            return others
        if not self._optimizer.state:  # no step was taken, so the moments are those from before
            return state
        for name, leaf in self._leaves.items():
            own = self._optimizer.state[leaf]
            others |= {f"optimizer/{moment}/{name}": own[moment].clone() for moment in _MOMENTS}
            others["optimizer/step"] = own["step"].clone()
        return others

    def _restore(self, name: str, leaf: torch.Tensor, state: ClientState) -> None:
        assert self._optimizer is not None
        own = {"step": state["optimizer/step"].clone()}
        for moment in _MOMENTS:
            kept = state.get(f"optimizer/{moment}/{name}")
            own[moment] = torch.zeros_like(leaf) if kept is None else kept.to(leaf.device, copy=True)
        self._optimizer.state[leaf] = own
