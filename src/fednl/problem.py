"""A client's data and loss as an algorithm sees them: functions of params, over a frozen backbone's live ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fednl.data import iterate_batches
from fednl.errors import NonFiniteError
from fednl.federation.params import Params
from fednl.models.context_vectors import answering, answers_of
from fednl.models.kept_prompts import first_predictions
from fednl.seeding import python_rng

if TYPE_CHECKING:
    from fednl.client import Bench

IGNORED = -100


def answer_nats(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy of a batch's answer tokens, in nats per token; a scalar with gradient.

    Only the answers' logits are computed. `batch` is what `fednl.data.collate` gives. Where context vectors are
    injected into answers only and prompts are kept, the answers alone run.
    """
    labels = batch["labels"]
    answers = answers_of(model, batch)
    if answers is not None:
        with answering(model, 0):
            found = model(**answers.inputs).logits.float()
        return torch.nn.functional.cross_entropy(found.flatten(0, 1), answers.labels.flatten(), ignore_index=IGNORED)
    positions = (labels != IGNORED).any(0).nonzero().squeeze(1)
    with answering(model, first_predictions(labels)):
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            use_cache=False,
            logits_to_keep=positions - 1,
        ).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, positions].flatten(), ignore_index=IGNORED)


class _Bridge(torch.autograd.Function):
    """The loss as a function of given tensors: values go into the live parameters, gradients come back."""

    @staticmethod
    def forward(ctx: Any, problem: ClientProblem, batch: Any, names: tuple[str, ...], *values: Tensor) -> Tensor:
        loss, ctx.gradients = problem.run(dict(zip(names, values, strict=True)), batch)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        return (None, None, None, *(gradient * outer[0] for gradient in ctx.gradients))


class ClientProblem:
    """A client's data and loss in one round, as an algorithm sees them (`fednl.federation.local.Problem`)."""

    def __init__(self, bench: Bench, client: str, round: int) -> None:
        self._bench, self._client, self._round = bench, client, round
        self._examples = bench.train_examples(client, round)

    @property
    def num_examples(self) -> int:
        """Trainable examples in the client's training split; in a stream, of the round's task."""
        return len(self._examples)

    def collect(self) -> Params:
        """Gives what the mounted adapters read off the training examples without training."""
        return self._bench.collect(self._client, self._round)

    def earlier(self, task: str) -> ClientProblem:
        """Gives the same client's data of an earlier task of its stream, as in the last round of that task."""
        assert self._bench.stream is not None, "tasks are named in streams only"
        return ClientProblem(self._bench, self._client, self._bench.stream.last_round(self._client, task))

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[dict[str, Tensor]]:
        """Gives `steps` batches, the same for the same (seed, client, round, purpose); size 0 is `training.batch`."""
        rng = python_rng(self._bench.config.run.seed, purpose, self._client, self._round)
        for examples in iterate_batches(self._examples, size or self._bench.config.training.batch, steps, rng):
            yield self._bench.collated(examples)

    def loss(self, params: Params, batch: dict[str, Tensor]) -> Tensor:
        """Gives the mean answer cross-entropy, differentiable with respect to `params`."""
        names = tuple(params)
        loss: Tensor = _Bridge.apply(self, batch, names, *params.values())  # type: ignore[no-untyped-call]
        return loss

    def run(self, params: Params, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Gives the loss at `params`, and its gradient for each of them in their order; NaN where there is none.

        Rules come in messages, on the CPU, whatever the backbone computes on: each gradient is where its tensor is, and
        the loss where the first of them is.
        """
        live = self._bench.put(params)
        place = next(iter(params.values())).device
        with torch.enable_grad():
            try:
                loss = self._bench.nats(batch)
            except NonFiniteError:  # the reply says so with its NaN, and the server refuses and counts it
                none = torch.full((), math.nan, device=place)
                return none, [torch.full_like(tensor, math.nan) for tensor in params.values()]
            moved = [name for name in params if live[name].requires_grad]
            found = torch.autograd.grad(loss, [live[name] for name in moved], materialize_grads=True)
        gradients = dict(zip(moved, found, strict=True))
        # A client's LoRA may have fewer components than the model's.
        return loss.detach().to(place), [
            gradients[name][tuple(map(slice, tensor.shape))].to(tensor.device)
            if name in gradients
            else torch.zeros_like(tensor)
            for name, tensor in params.items()
        ]
