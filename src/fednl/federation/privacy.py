"""Differential privacy for whole clients: clipping, noise, and what has been spent of the budget.

What is protected is one client with all its data. Under `"central"` noise, whoever sees the rules of all rounds, the
server apart, cannot well tell whether a given client took part (adding or removing one); under `"local"` noise, not
even the server can well tell one content of a client's data from another (replacing it). What a server measures
besides, on validation data say, is not covered.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from fednl.federation.accounting import Spent, local_epsilon, spent_epsilon
from fednl.federation.combine import NO_EXAMPLES
from fednl.federation.exchange import PrivacySettings
from fednl.federation.message import Message
from fednl.federation.params import Params, norm, shortened, subtract
from fednl.federation.wire import pack
from fednl.seeding import anew, seed_of, torch_rng

CLIP_RATE = 0.2
"""How fast an adaptive clip moves; the rate of Andrew et al. 2021."""

_CERTAIN = 2.0**63


class PrivateRound:
    """One round under noise: who is drawn, how the sum is made, and what is spent afterwards.

    Args:
        settings: the `[privacy]` section; its mode is not `"none"`.
        spent: the state before the round.
        clients: all of the federation, those in quarantine included.
        planned: how many clients a round is planned with.
        number: the round, counted from 1.
        attempt: how often the run went back before; coins and noise are others then.
    """

    def __init__(
        self,
        settings: PrivacySettings,
        spent: Spent,
        clients: Sequence[str],
        planned: int,
        number: int,
        attempt: int = 0,
    ) -> None:
        self._settings, self._spent, self._number, self._attempt = settings, spent, number, attempt
        self._is_central = settings.mode == "central"
        self._rate = min(1.0, planned / len(clients))
        self.sum = PrivateSum(settings, spent, planned, number, attempt) if self._is_central else None

    def draw(self, free: Sequence[str], otherwise: list[str]) -> list[str]:
        """Lists who is asked. Central noise counts on secret, independent coins; others are drawn as ever.

        Args:
            free: who may be asked.
            otherwise: who would be drawn without noise.
        """
        if not self._is_central:
            return otherwise
        purpose = anew("privacy-draw", self._attempt)
        coins = {name: seed_of(self._spent.secret, purpose, name, self._number) for name in free}
        return sorted(name for name in free if coins[name] < self._rate * _CERTAIN)

    def cost(self) -> float:
        """Gives the epsilon that will have been spent after this round, by the client that takes part in most."""
        if self.sum is not None:
            return spent_epsilon(self._settings, self._released())
        return local_epsilon(self._settings, max(self._spent.asked.values(), default=0) + 1)

    def after(self, asked: Iterable[str]) -> Spent:
        """Gives the state after the round; a round that changed nothing is counted too.

        Args:
            asked: who was asked.
        """
        spent = self.asking(asked)
        return spent if self.sum is None else replace(spent, clip=self.sum.next_clip())

    def asking(self, asked: Iterable[str]) -> Spent:
        """Gives what will have been spent once the round's question has left, with the clip as it is.

        Args:
            asked: who is asked.
        """
        if self.sum is not None:
            return self._released()
        counts = dict(self._spent.asked)
        for client in asked:
            counts[client] = counts.get(client, 0) + 1
        return replace(self._spent, asked=counts)

    def _released(self) -> Spent:
        return self._spent.with_release(self._settings.noise_multiplier, self._rate)


class PrivateSum:
    """Sums the clients' clipped changes, one in memory at a time, and adds noise before anyone sees the sum.

    The sum is divided by the planned number of clients, whoever came: an answer more or less then changes the result by
    no more than a clip over that number, and a client that stays away takes no noise with it.

    Args:
        settings: the `[privacy]` section.
        spent: the state before the round.
        planned: how many clients a round is planned with.
        number: the round, counted from 1.
        attempt: how often the run went back before.

    Source: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1, fixed-denominator estimator; the clip's own noise as
    Andrew et al. 2021 (arXiv 1905.03871), section 3, with a count at least so noisy that it costs little.
    """

    def __init__(self, settings: PrivacySettings, spent: Spent, planned: int, number: int, attempt: int = 0) -> None:
        self._settings, self._spent, self._planned = settings, spent, planned
        self._number, self._attempt = number, attempt
        self._start: Params = {}
        self._sum: Params = {}
        self._came = self._short = 0

    def starting_from(self, start: Params) -> PrivateSum:
        """Says from which rules changes are measured, and gives this sum back."""
        self._start = start
        self._sum = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        return self

    def add(self, message: Message) -> None:
        """Takes one reply in, however many examples it claims."""
        if message.num_examples <= 0:
            return
        before = {name: value.double() for name, value in self._start.items()}
        change = subtract({name: message.params[name].double() for name in before}, before)
        self.add_sum(shortened(change, self._spent.clip), 1)
        self._short += norm(change) <= self._spent.clip

    def add_sum(self, changes: Params, clients: int) -> None:
        """Takes the sum of changes that have been clipped already, float64.

        Args:
            changes: by name; not modified.
            clients: how many they are of.
        """
        self._came += clients
        self._sum = {name: total + changes[name] for name, total in self._sum.items()}

    def fault(self) -> str:
        """Says that nobody came, if so."""
        return "" if self._came else NO_EXAMPLES

    def products(self) -> Params:
        """Gives nothing: no statistics of single updates leave."""
        return {}

    def result(self) -> Message:
        """Gives the rules moved by the noisy mean."""
        rng = self._rng("privacy-noise")
        scale = self._noise_of_the_sum() * self._spent.clip
        params = {}
        for name, total in sorted(self._sum.items()):
            noise = torch.randn(total.shape, generator=rng, dtype=torch.float64).to(total.device) * scale
            start = self._start[name]
            params[name] = (start.double() + (total + noise) / self._planned).to(start.dtype)
        return Message(params, num_examples=self._came)

    def facts(self) -> dict[str, float]:
        """Gives the clip of the round; how many were longer is as private as the sum."""
        return {"clip": self._spent.clip}

    def next_clip(self) -> float:
        """Gives the clip of the next round: the same, or nearer to the quantile of lengths, by a noisy count."""
        if not self._settings.adaptive_clip:
            return self._spent.clip
        rng = self._rng("privacy-clip")
        noise = float(torch.randn((), generator=rng, dtype=torch.float64)) * self._noise_of_the_count()
        below = 0.5 + (self._short - 0.5 * self._came + noise) / self._planned
        return self._spent.clip * math.exp(-CLIP_RATE * (below - self._settings.clip_quantile))

    def _rng(self, purpose: str) -> torch.Generator:
        key = _keyed(self._spent.secret, self._start, self._sum)
        return torch_rng(key, anew(purpose, self._attempt), "", self._number)

    def _noise_of_the_count(self) -> float:
        return max(self._planned / 20, 2 * self._settings.noise_multiplier)

    def _noise_of_the_sum(self) -> float:
        """So much that sum and count together are as noisy as the setting says; a client moves the count by a half."""
        noise = self._settings.noise_multiplier
        if not self._settings.adaptive_clip:
            return noise
        return 1 / math.sqrt(noise**-2 - (2 * self._noise_of_the_count()) ** -2)


def _keyed(secret: int, start: Params, change: Params) -> int:
    """A secret of one answer to one question: the same answer has the same noise, and no two others share theirs.

    Noise that went by the round alone would cancel in the difference of two answers to the same round, from other rules
    or of other clients.
    """
    digest = hashlib.sha256(secret.to_bytes(8, "big", signed=True) + pack(start) + pack(change)).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def noisy(
    params: Params, start: Params, settings: PrivacySettings, secret: int, client: str, round: int, attempt: int = 0
) -> Params:
    """Gives a client's rules with their change clipped and drowned in noise, as they may leave it.

    Args:
        params: the trained rules; not modified.
        start: the rules that training began with.
        settings: the `[privacy]` section; `clip` and `noise_multiplier` are read.
        secret: the client's own; the same answer to the same question gets the same noise, as two would average out.
        client: its name.
        round: counted from 1.
        attempt: how often the run went back before; a round that is done again is counted again.
    """
    change = shortened(subtract(params, start), settings.clip)
    rng = torch_rng(_keyed(secret, start, change), anew("privacy-noise", attempt), client, round)
    scale = settings.noise_multiplier * settings.clip
    made = {}
    for name, value in sorted(change.items()):
        noise = torch.randn(value.shape, generator=rng, dtype=torch.float64).to(value.device) * scale
        made[name] = (start[name].double() + value.double() + noise).to(value.dtype)
    return made
