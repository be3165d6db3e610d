"""What a frozen model makes of prompts, kept where nothing is injected into them: a step then runs the answers alone.

With `context-vectors.inject = "answer"` the tokens before the one at which the answer is predicted pass through the
plain model. Their keys and values are the same in every step and round, so they are computed once. They are private
text in another form: they stay in this process and go with the adapter.
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

    def new_cache(self) -> Any:
        """An empty cache for a pass whose keys and values `keep` is given."""
        from transformers import DynamicCache

        return DynamicCache()  # without the config, so that a layer with a sliding window keeps all of a prompt

    def keep(self, ids: Tensor, lengths: Tensor, cache: Any) -> list[Tensor]:
        """Takes rows' keys and values out of a cache, and keeps them where there is room.

        Args:
            ids: `[batch, tokens]`, right-padded.
            lengths: `[batch]`, how many tokens of each row stand before the one at which its answer is predicted.
            cache: what a pass of the plain model over them left.

        Returns:
            Per row `[layers, 2, heads, length, head_dim]`.
        """
        found = []
        for row, length in enumerate(lengths.tolist()):
            pairs = [torch.stack([x.keys[row, :, :length], x.values[row, :, :length]]) for x in cache.layers]
            found.append(torch.stack(pairs).clone())
            size = found[-1].nbytes
            if self.held_bytes + size <= self._limit_bytes and (key := _key(ids[row, :length])) not in self._kept:
                self._kept[key], self.held_bytes = found[-1], self.held_bytes + size
        self.computed += len(found)
        return found

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
        before = self._before(ids, first)
        longest, ends = int(first.max()), batch["attention_mask"].sum(1) - 1  # the last token predicts nothing
        width = int((ends - first).max())
        where = first[:, None] + torch.arange(width, device=ids.device)
        real = where < ends[:, None]
        where = where.clamp(max=ids.shape[1] - 2)
        pads = longest - first
        cache = self.new_cache()
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
        wanted = labels.gather(1, where + 1).masked_fill(~real, IGNORED)
        return Answers(inputs | {cache_argument(self._model): cache}, wanted)

    def _before(self, ids: Tensor, lengths: Tensor) -> list[Tensor]:
        """What is kept of each row's prompt; what is not is computed."""
        keys = [_key(row[:length]) for row, length in zip(ids, lengths.tolist(), strict=True)]
        found = {key: self._kept[key] for key in keys if key in self._kept}
        new = [row for row, key in enumerate(keys) if key not in found]
        if new:
            rows, longest = ids[new], int(lengths.max())
            mask = torch.arange(longest, device=ids.device) < lengths[new][:, None]
            cache = self.new_cache()
            inputs = {"input_ids": rows[:, :longest], "attention_mask": mask.long(), cache_argument(self._model): cache}
            with torch.no_grad(), self._injection.answers_from(longest):
                trunk_of(self._model)(**inputs, use_cache=True)
            found |= zip([keys[row] for row in new], self.keep(rows, lengths[new], cache), strict=True)
        return [found[key] for key in keys]


def first_predictions(labels: Tensor) -> Tensor:
    """Gives the token at which each row's answer begins to be predicted, `[batch]`: the one before its first label."""
    return (labels != IGNORED).int().argmax(dim=1) - 1


def _key(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().contiguous().numpy().tobytes()).hexdigest()
