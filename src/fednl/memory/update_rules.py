"""The update rules by name: what `[memory] rule` may be, and what each needs. Imports no torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UpdateRule:
    """How a memory is written.

    Args:
        fast: the function that layers run, as `module:name` within `fednl.memory`. It takes `q`, `k`, `v`, `beta`,
            `state` and `chunk_tokens` as `delta_rule` does, and what the flags below add; it returns the answers, the
            state and, with `momentum` or `inner`, what else is carried on.
        reference: its specification, token by token, in the same form.
        decays: it takes `log_decay`, learned per KV head and token.
        momentum: it takes `log_momentum`, `keep` and `momentum`, and gives the momentum back.
        several: `k`, `v` and `beta` have a dimension for the writes of a token after `tokens`.
        inner: its state is the change of a small model that tokens train in mini-batches. Instead of `chunk_tokens` it
            takes `batch_tokens`, and `start`, `scale`, `shift`, `keep`, `gathered` and `taken`; it gives the last two
            back.
        widest: the largest `write-range` under which, with keys of at most length 1, no write amplifies the state; for
            the Hebbian rule, whose writes take nothing away, the largest there is. 1 where no bound is known.
    """

    fast: str
    reference: str
    decays: bool = False
    momentum: bool = False
    several: bool = False
    inner: bool = False
    widest: int = 2


# A new rule is its functions and one entry here.
RULES: dict[str, UpdateRule] = {
    "delta": UpdateRule("kernels:delta_rule", "operator:delta_rule_reference"),
    "implicit-delta": UpdateRule("rules_chunked:implicit_delta_rule", "rules_reference:implicit_delta_reference"),
    "gated-delta": UpdateRule("kernels:delta_rule", "operator:delta_rule_reference", decays=True),
    "decay-separate": UpdateRule(
        "rules_chunked:decay_separate_rule", "rules_reference:decay_separate_reference", decays=True, widest=1
    ),
    "hebbian": UpdateRule("rules_chunked:hebbian_rule", "rules_reference:hebbian_reference"),
    "delta-product": UpdateRule(
        "rules_chunked:delta_product_rule", "rules_reference:delta_product_reference", several=True
    ),
    "gated-delta-product": UpdateRule(
        "rules_chunked:delta_product_rule", "rules_reference:delta_product_reference", decays=True, several=True
    ),
    "titans": UpdateRule(
        "rules_chunked:titans_rule", "rules_reference:titans_reference", decays=True, momentum=True, widest=1
    ),
    "ttt-linear": UpdateRule("ttt:ttt_linear_rule", "ttt:ttt_linear_reference", inner=True, widest=1),
}
"""The update rules by the name that `[memory] rule` takes."""


@functools.cache
def function(place: str) -> Callable[..., Any]:
    """Loads a rule's function from its `module:name`."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"fednl.memory.{module}"), name)
    return found
