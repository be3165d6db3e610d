"""Backbones without attention (Mamba): what reading a prompt once and going on from it takes."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import DynamicCache


class RecurrentCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache of a recurrent model, with what answering by candidates needs besides.

    Its states are the same size however long the context. After the prompt, tokens go in one at a time
    (`one_at_a_time`): for a longer piece transformers' Mamba gives other logits than for its tokens one by one or for
    the whole text at once (5.24, by 1e-4 of 2.4 in a random model, in float64).

    Args:
        model: a model whose layers are all recurrent.
    """

    one_at_a_time = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(config=model.config)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row's states, each row's copies side by side.

        Args:
            repeats: how often, at least 1.
        """
        for layer in self.layers:
            for name in ("conv_states", "recurrent_states"):
                setattr(layer, name, _repeated(getattr(layer, name), repeats))


def _repeated(states: Any, repeats: int) -> Any:
    """One tensor, or one for each kind of state, with the batch first."""
    if isinstance(states, dict):
        return {key: _repeated(value, repeats) for key, value in states.items()}
    if isinstance(states, list | tuple):
        return type(states)(_repeated(value, repeats) for value in states)
    return states if states is None else states.repeat_interleave(repeats, dim=0)
