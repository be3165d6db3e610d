"""What a frozen model makes of prompts, kept where nothing is injected into them: a step then runs the answers alone.

With `context-vectors.inject = "answer"` the tokens before the one at which the answer is predicted pass through the
plain model. Their keys and values are the same in every step and round, so they are computed once, of each prompt
alone: no bit depends on what was kept, nor on the company in which a prompt came first. They are private text in
another form: they stay in this process and go with the adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fednl.data.batches import IGNORED
from fednl.memory.sites import cache_argument
from fednl.models.context_injection import ContextInjection, trunk_of


@dataclass(frozen=True)
class Answers:
    """The part of a batch that still has to run, with what is kept of the rest.

    Attributes:
        inputs: what the model's forward takes.
        labels: `[batch, tokens]`: what each of its tokens is to predict, -100 for nothing.
    """

    inputs: dict[str, Any]
    labels: Tensor


@dataclass(frozen=True)
class Rest:
    """Rows without their first tokens, whose keys and values are there.

    Attributes:
        inputs: what the model's forward takes.
        where: `[batch, tokens]`, which token of its row each one is; a pad repeats one.
        real: `[batch, tokens]` bool, False for pads, which come last.
    """

    inputs: dict[str, Any]
    where: Tensor
    real: Tensor


class KeptPrompts:
    """Keys and values of prompts by their tokens, up to a limit; the first ones stay.

    Args:
        model: a frozen causal model with plain attention that nothing but context vectors sits on.
        injection: these; it injects into answers only.
        limit_bytes: no more than this is kept; prompts beyond it are computed every time.

    Attributes:
        held_bytes: how much is kept.
        computed: how many prompts went through the model.
    """

    def __init__(self, model: nn.Module, injection: ContextInjection, limit_bytes: int) -> None:
        self._model, self._injection, self._limit_bytes = model, injection, limit_bytes
        self._kept: dict[str, Tensor] = {}
        self.held_bytes = self.computed = 0

    def answers(self, batch: Mapping[str, Tensor]) -> Answers | None:
        """Cuts the prompts off a training batch; None where a prompt is too short to be cut.

        Args:
            batch: `input_ids`, `attention_mask` and `labels`, as `fednl.data.collate` gives them; every row has an
                answer.
        """
        ids, labels = batch["input_ids"], batch["labels"]
        first = first_predictions(labels)
        if int(first.min()) < 1:
            return None
        rest = self.rest(ids, first, batch["attention_mask"].sum(1) - 1)  # the last token predicts nothing
        wanted = labels.gather(1, (rest.where + 1).clamp(max=ids.shape[1] - 1))
        return Answers(rest.inputs, wanted.masked_fill(~rest.real, IGNORED))

    def rest(self, ids: Tensor, first: Tensor, ends: Tensor) -> Rest:
        """Cuts the beginnings off some rows.

        Args:
            ids: `[batch, tokens]`, right-padded.
            first: `[batch]`, where each row is cut; at least 1.
            ends: `[batch]`, where what is wanted of it ends; above `first`.
        """
        before = [self._before(row[:cut]) for row, cut in zip(ids, first.tolist(), strict=True)]
        longest = int(first.max())
        where = first[:, None] + torch.arange(int((ends - first).max()), device=ids.device)
        real = where < ends[:, None]
        where = where.clamp(max=ids.shape[1] - 1)
        pads = longest - first
        cache = _new_cache()
        padded = torch.stack([nn.functional.pad(kv, (0, 0, int(pad), 0)) for kv, pad in zip(before, pads, strict=True)])
        for layer in range(padded.shape[1]):
            cache.update(padded[:, layer, 0], padded[:, layer, 1], layer)
        seen = torch.arange(longest, device=ids.device) >= pads[:, None]
        inputs: dict[str, Any] = {
            "input_ids": ids.gather(1, where),
            "attention_mask": torch.cat([seen, real], dim=1).long(),
            "position_ids": where,
            "use_cache": True,
        }
        return Rest(inputs | {cache_argument(self._model): cache}, where, real)

    def _before(self, ids: Tensor) -> Tensor:
        """Keys and values of a prompt, `[layers, 2, heads, tokens, head_dim]`; computed of it alone if not kept."""
        key = _key(ids)
        if key in self._kept:
            return self._kept[key]
        cache = _new_cache()
        with torch.no_grad(), self._injection.answers_from(len(ids)):
            inputs = {"input_ids": ids.unsqueeze(0), cache_argument(self._model): cache}
            trunk_of(self._model)(**inputs, use_cache=True)
        found = torch.stack([torch.stack([x.keys[0], x.values[0]]) for x in cache.layers])
        self.computed += 1
        if self.held_bytes + found.nbytes <= self._limit_bytes:
            self._kept[key], self.held_bytes = found, self.held_bytes + found.nbytes
        return found


def _new_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()  # without the config, so that a layer with a sliding window keeps all of a prompt


def first_predictions(labels: Tensor) -> Tensor:
    """Gives the token at which each row's answer begins to be predicted, `[batch]`: the one before its first label."""
    return (labels != IGNORED).int().argmax(dim=1) - 1


def _key(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().contiguous().numpy().tobytes()).hexdigest()
