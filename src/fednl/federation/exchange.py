"""The sections `[traffic]`, `[combine]` and `[privacy]`: how updates travel, become one, and are hidden. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from fednl.errors import SettingsError
from fednl.federation.settings import FederationSettings
from fednl.federation.traits import Traits
from fednl.section import Section

FEWEST_MASKED = 3
"""A masked sum of fewer clients hides nothing."""


class TrafficSettings(Section):
    """How the shared rules are written on the wire, by direction; what an algorithm sends beside them stays as it is.

    Args:
        up: a client's numbers: `"float32"` is as trained, `"float16"` and `"bfloat16"` take half the bytes, `"int8"` a
            quarter, with one scale a tensor.
        down: the server's numbers, the same without `"int8"`.
        content: what a client sends: the `"values"` of its rules, or `"deltas"`, their change from what it received.
            Small changes keep more of their digits in few bits.
        error_feedback: with `"int8"`, what rounding took from a client's delta is added to its next one.
    """

    up: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    down: Literal["float32", "float16", "bfloat16"] = "float32"
    content: Literal["values", "deltas"] = "values"
    error_feedback: bool = True

    @property
    def up_coding(self) -> str:
        """The tag that a client's message carries, one of `fednl.federation.coding.CODINGS`."""
        return self.up if self.content == "values" else f"{self.up}-deltas"


class CombineSettings(Section):
    """How a round's updates become one, and how far a single client can move it.

    A robust rule counts every client once and holds all updates of a round in memory. It withstands `attackers` faulty
    clients, those that are missing or refused included, out of n >= 2 attackers + 3 that are asked, and only while the
    honest updates resemble each other: among a few unlike clients, `"median"` and `"trimmed-mean"` throw away what
    only one of them knows, and `"multi-krum"` leaves whole clients out.

    Args:
        rule: `"mean"`, `"trimmed-mean"` (of every number without the `attackers` largest and smallest), `"median"` (of
            every number), or `"multi-krum"` (the mean of the n - attackers updates that lie closest together).
        weights: what a client counts in the mean: its `"examples"`, or as much as any other, `"uniform"`.
        max_examples: a client counts as at most so many examples; 0 for no limit but 10^9.
        norm_cap: the largest L2 norm, over all shared rules together, of the change that a client may bring; a longer
            one is shortened to it. 0 for no limit.
        attackers: how many clients of a round a robust rule must withstand.
    """

    rule: Literal["mean", "trimmed-mean", "median", "multi-krum"] = "mean"
    weights: Literal["examples", "uniform"] = "examples"
    max_examples: int = Field(default=0, ge=0)
    norm_cap: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    attackers: int = Field(default=1, ge=1)

    @property
    def fewest(self) -> int:
        """How many clients must be asked in a round under this rule."""
        return 1 if self.rule == "mean" else 2 * self.attackers + 3

    def counted(self, examples: int) -> int:
        """Gives what a client with so many examples counts in the mean."""
        if self.weights == "uniform":
            return int(examples > 0)
        return min(examples, self.max_examples or examples)

    @property
    def is_plain(self) -> bool:
        """Whether this is the weighted mean and nothing else."""
        return self.rule == "mean" and not self.norm_cap


class PrivacySettings(Section):
    """What is hidden, and from whom. The unit is a client with all its data.

    Args:
        mode: `"none"`; `"central"`: the server shortens each client's change, over all shared rules together, to
            `clip`, adds Gaussian noise to the sum and divides by the number of clients planned for a round, so that
            the rules tell little of whether a client took part; `"local"`: each client shortens and adds that noise
            itself, so that its own messages tell little of its data. Local noise is many times larger in the mean.
            Under central noise `clients-per-round` is how many are drawn on average: keep the quorum well below it.
        noise_multiplier: standard deviation of the noise, in lengths of `clip`; above 0.
        clip: the longest change, as L2 norm; above 0. Where it adapts, the first round's.
        adaptive_clip: let `clip` follow the length that `clip_quantile` of the changes stay below; central only.
        clip_quantile: see `adaptive_clip`; above 0 and below 1.
        delta: the probability that the guarantee allows to fail; below 1 over the number of clients.
        epsilon: the budget: the run ends before the round that would spend more; 0 for no budget.
        min_examples: a client with fewer examples takes no part: an update of one example is nearly that example.
        secure: masked sums: the server sees the sum of a round's changes and no single one. A hostile client's
            update cannot be told from others then.
        secure_range: with `secure`, the largest change of one number that can be sent; larger ones are cut to it.
        noise_seed: fixes the noise, and who is drawn, for a simulation that must repeat itself. Whoever knows it can
            take the noise away: left out, it comes from the system and stays in the server's checkpoints.

    Source: DP-FedAvg, McMahan et al. 2018 (arXiv 1710.06963); adaptive clip, Andrew et al. 2021 (arXiv 1905.03871);
    masked sums, Bonawitz et al. 2017 (CCS).
    """

    mode: Literal["none", "central", "local"] = "none"
    noise_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    clip: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    adaptive_clip: bool = False
    clip_quantile: float = Field(default=0.5, gt=0, lt=1)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    epsilon: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    min_examples: int = Field(default=1, ge=1)
    secure: bool = False
    secure_range: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    noise_seed: int | None = Field(default=None, ge=0)


@dataclass(frozen=True)
class Exchange:
    """How updates travel, become one and are hidden: the sections that both sides of a round must agree on."""

    traffic: TrafficSettings = field(default_factory=TrafficSettings)
    combine: CombineSettings = field(default_factory=CombineSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)

    @property
    def hides(self) -> bool:
        """Whether single updates are hidden in a noisy or a masked sum, so that only sums may be looked at."""
        return self.privacy.mode == "central" or self.privacy.secure

    def changed(self) -> dict[str, Any]:
        """Gives what is not at its default, by section and key, for a checkpoint to remember."""
        sections: dict[str, Section] = {"traffic": self.traffic, "combine": self.combine, "privacy": self.privacy}
        told = {
            name: own.model_dump(mode="json", by_alias=True, exclude_defaults=True) for name, own in sections.items()
        }
        return {name: keys for name, keys in told.items() if keys}


PLAIN = Exchange()
"""Float32 both ways, weighted mean, nothing bounded."""


def check_exchange(exchange: Exchange, federation: FederationSettings, traits: Traits, asked: int = 0) -> None:
    """Refuses sections that cannot work together, before anything is loaded or asked.

    Args:
        exchange: the sections.
        federation: the `[federation]` section.
        traits: the algorithm's.
        asked: how many clients are asked in a round; 0 where that is not known yet.

    Raises:
        SettingsError: names the keys and the remedy.
    """
    traffic, combine = exchange.traffic, exchange.combine
    if traffic.up == "int8" and traffic.content == "values":
        raise SettingsError('[traffic] up = "int8" would round whole rules: set content = "deltas", or up = "float16".')
    if traits.sends_extra and not combine.is_plain:
        raise SettingsError(
            f'[federation] algorithm = "{federation.algorithm}" sends more than rules, which [combine] cannot bound: '
            'set rule = "mean" and norm-cap = 0, or another algorithm.'
        )
    if federation.lora_ranks and traits.sends_extra:
        raise SettingsError(
            f'[federation] lora-ranks is set, but algorithm = "{federation.algorithm}" sends tensors of one size '
            'beside the rules; leave it out, or choose algorithm = "fedavg" or "flexlora".'
        )
    if (traits.averages_products or federation.lora_ranks) and not combine.is_plain:
        what = f'algorithm = "{federation.algorithm}"' if traits.averages_products else "lora-ranks"
        raise SettingsError(
            f"[federation] {what} takes the mean of LoRA products, or of unlike ranks, which [combine] cannot bound: "
            'set rule = "mean" and norm-cap = 0, or leave it out.'
        )
    asked = asked or federation.clients_per_round
    if 0 < asked < combine.fewest:
        raise SettingsError(
            f'[combine] rule = "{combine.rule}" withstands attackers = {combine.attackers} among {combine.fewest} or '
            f'more clients, but {asked} are asked: lower attackers, or set rule = "mean".'
        )
    if exchange.privacy.mode != "none" or exchange.privacy.secure:
        _check_privacy(exchange, federation, traits)
    if exchange.privacy.secure and 0 < asked < FEWEST_MASKED:
        raise SettingsError(
            f"[privacy] secure = true needs {FEWEST_MASKED} clients or more in a round, but {asked} are asked: of two, "
            "each would learn the other's change from the sum."
        )


def _check_privacy(exchange: Exchange, federation: FederationSettings, traits: Traits) -> None:
    """What noise and masks take for granted: changes only, counted once each, and nothing beside them."""
    privacy, combine = exchange.privacy, exchange.combine
    what = f'mode = "{privacy.mode}"' if privacy.mode != "none" else "secure = true"
    if traits.sends_extra or traits.averages_products or federation.lora_ranks:
        raise SettingsError(
            f'[federation] algorithm = "{federation.algorithm}" or lora-ranks needs more of single clients than '
            f'[privacy] {what} lets out: use algorithm = "fedavg" and one rank.'
        )
    if combine.weights != "uniform":
        raise SettingsError(
            f"[privacy] {what} counts every client once, as its number of examples is private: set [combine] "
            'weights = "uniform".'
        )
    if exchange.hides and not combine.is_plain:
        raise SettingsError(
            f"[combine] rule and norm-cap look at single updates, which [privacy] {what} hides in a sum: set "
            'rule = "mean" and norm-cap = 0; [privacy] clip bounds a client.'
        )
    if privacy.adaptive_clip and (privacy.mode != "central" or privacy.secure):
        raise SettingsError(
            '[privacy] adaptive-clip needs the lengths of single updates: set mode = "central" and secure = false.'
        )
    if privacy.secure and privacy.mode == "central" and privacy.secure_range < privacy.clip:
        raise SettingsError(
            f"[privacy] secure-range = {privacy.secure_range:g} would cut changes that clip = {privacy.clip:g} allows: "
            "set it to at least the clip."
        )
    if privacy.secure and (privacy.mode == "local" or exchange.traffic.up != "float32"):
        raise SettingsError(
            '[privacy] secure = true sends masked whole numbers of changes: set [traffic] up = "float32", and mode '
            '"central" or "none".'
        )
