"""Combining rules that a few hostile clients cannot move far: they look at all updates of a round at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fednl.federation.combine import NO_EXAMPLES, Combiner, Mean, within
from fednl.federation.exchange import CombineSettings
from fednl.federation.message import Message
from fednl.federation.params import Params


def make_combiner(settings: CombineSettings, start: Params, asked: int) -> Combiner:
    """Gives what combines a round's replies.

    Args:
        settings: the `[combine]` section.
        start: the shared rules that were sent out.
        asked: how many clients a round of this run asks.
    """
    return Mean(settings, start) if settings.rule == "mean" else Robust(settings, start, asked)


class Robust:
    """A robust rule over one round's replies: every client counts once, and all updates are held until the end.

    A client that did not answer or was refused is one of the faulty ones that the rule allows for; more than those
    leave too few updates, which then make none at all.

    Args:
        settings: the `[combine]` section; its `rule` is one of `RULES`.
        start: the shared rules that were sent out.
        asked: how many clients a round of this run asks, at least `settings.fewest`.
    """

    def __init__(self, settings: CombineSettings, start: Params, asked: int) -> None:
        self._settings, self._start, self._asked = settings, start, asked
        self._updates: list[Params] = []

    def add(self, message: Message) -> None:
        """Takes one reply in, shortened to the cap if there is one."""
        if message.num_examples > 0:
            self._updates.append(within(message, self._start, self._settings.norm_cap).params)

    def fault(self) -> str:
        """Says how many updates are missing, if there are too few."""
        came, attackers = len(self._updates), self._settings.attackers
        needed = self._settings.fewest - min(attackers, self._asked - came)
        if not came or came >= needed:
            return "" if came else NO_EXAMPLES
        return f"{came} updates of {self._asked} clients are too few for {self._settings.rule} against {attackers}"

    def result(self) -> Message:
        """Gives the combined rules; `num_examples` is the number of updates."""
        return Message(
            RULES[self._settings.rule](self._updates, self._settings.attackers), num_examples=len(self._updates)
        )

    def facts(self) -> dict[str, float]:
        """Gives how many updates the rule looked at."""
        return {"combined_updates": float(len(self._updates))}


def trimmed_mean(updates: list[Params], attackers: int) -> Params:
    """Averages every number over the clients, without the `attackers` largest and smallest.

    Every number of the result lies between honest clients' numbers if n >= 2 attackers + 1; of fewer updates, one or
    two in the middle are kept.

    Args:
        updates: n clients' rules, finite, with the same names and shapes.
        attackers: how many clients may send anything.

    Returns:
        New tensors in the dtypes of the first; computed in float64.

    Source: Yin et al. 2018 (arXiv 1803.01498), Definition 2.
    """
    trimmed = min(attackers, (len(updates) - 1) // 2)
    kept = slice(trimmed, len(updates) - trimmed)
    return _by_number(updates, lambda stack: stack.sort(dim=0).values[kept].mean(dim=0))


def median(updates: list[Params], attackers: int) -> Params:
    """Gives every number's median over the clients; of an even number, the mean of the middle two.

    Args:
        updates: as for `trimmed_mean`.
        attackers: not needed: the median withstands any minority.

    Source: Yin et al. 2018 (arXiv 1803.01498), Definition 1.
    """
    low, high = (len(updates) - 1) // 2, len(updates) // 2
    return _by_number(updates, lambda stack: stack.sort(dim=0).values[[low, high]].mean(dim=0))


def multi_krum(updates: list[Params], attackers: int) -> Params:
    """Averages the n - attackers updates that lie closest to others, by Krum's score.

    Args:
        updates: n >= attackers + 3 clients' rules; the published guarantee is for n >= 2 attackers + 3.
        attackers: how many clients may send anything.

    Source: Blanchard et al. 2017 (NeurIPS), sections 4 and 5, with m = n - f.
    """
    chosen = krum_order(updates, attackers)[: len(updates) - attackers]
    return _by_number([updates[i] for i in sorted(chosen)], lambda stack: stack.mean(dim=0))


def krum_order(updates: list[Params], attackers: int) -> list[int]:
    """Orders updates by Krum's score, best first: the sum of squared distances to the nearest n - attackers - 2.

    Distances are of differences, in float64; of equal scores the earlier update comes first.
    """
    count = len(updates)
    squared = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(i):
            change = (updates[i][name].double() - other.double() for name, other in updates[j].items())
            squared[i, j] = squared[j, i] = sum(float(part.square().sum()) for part in change)
    # The first column of the sorted rows is the distance to itself.
    scores = squared.sort(dim=1).values[:, 1 : count - attackers - 1].sum(dim=1)
    return sorted(range(count), key=lambda i: (float(scores[i]), i))


def _by_number(updates: list[Params], rule: Callable[[torch.Tensor], torch.Tensor]) -> Params:
    """Applies a rule over clients to every tensor, one name at a time, in float64."""
    return {
        name: rule(torch.stack([update[name].double() for update in updates])).to(value.dtype)
        for name, value in updates[0].items()
    }


RULES: dict[str, Callable[[list[Params], int], Params]] = {
    "trimmed-mean": trimmed_mean,
    "median": median,
    "multi-krum": multi_krum,
}
"""The robust rules by the name that `[combine] rule` takes."""
