"""What noise has cost: the state that the server must remember, and the epsilon of it.

Under central noise, neighbours are federations with one client more or less; under local noise, contents of one client.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fednl.errors import SettingsError
from fednl.federation.exchange import PrivacySettings
from fednl.seeding import seed_of


@dataclass(frozen=True)
class Spent:
    """What the server must remember to go on with noise: a part of every checkpoint.

    It is noted beside the checkpoints too (`fednl.federation.attempts`).

    Args:
        secret: where the noise and the drawing of clients come from. Whoever knows it can take the noise away.
        clip: the clip of the next round.
        releases: (noise multiplier, part of the clients that was drawn, how many rounds), oldest first.
        asked: by client, in how many rounds it was asked; kept under local noise only.
    """

    secret: int
    clip: float
    releases: tuple[tuple[float, float, int], ...] = ()
    asked: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Gives what JSON can hold."""
        return {**vars(self), "releases": [list(release) for release in self.releases]}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Spent:
        """Reads what `to_dict` gave."""
        return cls(**{**facts, "releases": tuple((z, q, int(n)) for z, q, n in facts["releases"])})

    def at_least(self, counts: Mapping[str, Any] | None) -> Spent:
        """Gives this with no less spent than was noted elsewhere.

        Args:
            counts: as `to_dict` gave it, of the same run, or its `releases` and `asked`; None changes nothing.
        """
        if counts is None:
            return self
        noted = Spent.from_dict({**self.to_dict(), **counts})
        releases = max(self.releases, noted.releases, key=lambda some: sum(one[2] for one in some))
        clients = self.asked.keys() | noted.asked.keys()
        asked = {one: max(self.asked.get(one, 0), noted.asked.get(one, 0)) for one in sorted(clients)}
        return replace(self, releases=releases, asked=asked)

    def with_release(self, noise: float, rate: float) -> Spent:
        """Gives this after one more round of sum and noise."""
        *before, last = [*self.releases] or [(0.0, 0.0, 0)]
        if last[:2] == (noise, rate):
            return replace(self, releases=(*before, (noise, rate, last[2] + 1)))
        return replace(self, releases=(*self.releases, (noise, rate, 1)))


def begin_privacy(settings: PrivacySettings, clients: int, arm: str = "") -> Spent | None:
    """Gives the state before the first round; None without noise.

    Args:
        settings: the `[privacy]` section.
        clients: how many there are.
        arm: which arm of a comparison this is: two with the same noise would tell what it hides.

    Raises:
        SettingsError: the library that counts what is spent is not installed, or delta promises nothing.
    """
    if settings.mode == "none":
        return None
    check_accounting(settings)
    if settings.delta * clients >= 1:
        raise SettingsError(
            f"[privacy] delta = {settings.delta:g} would allow one of {clients} clients to be given away whole: set it "
            f"below 1 / {clients}, better far below."
        )
    secret = secrets.randbits(62) if settings.noise_seed is None else seed_of(settings.noise_seed, "privacy", arm)
    return Spent(secret, settings.clip)


def check_accounting(settings: PrivacySettings) -> None:
    """Refuses noise whose cost nobody could count.

    Args:
        settings: the `[privacy]` section.

    Raises:
        SettingsError: dp-accounting is not installed.
    """
    if settings.mode != "none" and importlib.util.find_spec("dp_accounting") is None:
        raise SettingsError(
            f'[privacy] mode = "{settings.mode}" needs dp-accounting, which is not installed: run '
            "`pip install 'fednl[privacy]'`."
        )


def epsilon_of(releases: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Gives the epsilon that Gaussian releases have cost together.

    Args:
        releases: (noise multiplier: standard deviation over sensitivity, part of the clients drawn by independent
            coins, number of such rounds).
        delta: the probability that the guarantee allows to fail.

    Source: dp-accounting's Renyi accountant with its own orders; neighbours differ by one client more or less.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for noise, rate, count in releases:
        event: Any = GaussianDpEvent(noise)
        accountant.compose(event if rate >= 1 else PoissonSampledDpEvent(rate, event), count)
    return float(accountant.get_epsilon(delta))


def spent_epsilon(settings: PrivacySettings, spent: Spent) -> float:
    """Gives what has been spent: for all clients alike, or under local noise for the one that was asked most.

    Args:
        settings: the `[privacy]` section.
        spent: the state.
    """
    if settings.mode == "central":
        return epsilon_of(spent.releases, settings.delta) if spent.releases else 0.0
    return local_epsilon(settings, max(spent.asked.values(), default=0))


def local_epsilon(settings: PrivacySettings, rounds: int) -> float:
    """Gives what rounds of local noise cost the client that was asked in them.

    Two contents of one client lie up to two clips apart, so noise of z clips is z / 2 of them.

    Args:
        settings: the `[privacy]` section.
        rounds: how many.
    """
    return epsilon_of([(settings.noise_multiplier / 2, 1.0, rounds)], settings.delta) if rounds else 0.0
