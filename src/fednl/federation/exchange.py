"""The sections `[traffic]` and `[combine]`: how updates travel, and how they become one. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from fednl.errors import SettingsError
from fednl.federation.settings import FederationSettings, Section

ROBUST = ("trimmed-mean", "median", "multi-krum")


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

    A robust rule counts every client once and holds all updates of a round in memory. It withstands `attackers`
    clients out of n >= 2 attackers + 3, and only while the honest updates resemble each other: among a few unlike
    clients, `"median"` and `"trimmed-mean"` throw away what only one of them knows, and `"multi-krum"` leaves whole
    clients out.

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
        """How many updates with examples a round needs under this rule."""
        return 1 if self.rule == "mean" else 2 * self.attackers + 3

    @property
    def is_plain(self) -> bool:
        """Whether this is the weighted mean and nothing else."""
        return self.rule == "mean" and not self.norm_cap


@dataclass(frozen=True)
class Exchange:
    """How updates travel and how they become one: the sections that both sides of a round must agree on."""

    traffic: TrafficSettings = field(default_factory=TrafficSettings)
    combine: CombineSettings = field(default_factory=CombineSettings)

    def changed(self) -> dict[str, Any]:
        """Gives what is not at its default, by section and key, for a checkpoint to remember."""
        sections = {"traffic": self.traffic, "combine": self.combine}
        told = {
            name: own.model_dump(mode="json", by_alias=True, exclude_defaults=True) for name, own in sections.items()
        }
        return {name: keys for name, keys in told.items() if keys}


PLAIN = Exchange()
"""Float32 both ways, weighted mean, nothing bounded."""


def check_exchange(exchange: Exchange, federation: FederationSettings, sends_extra: bool) -> None:
    """Refuses sections that cannot work together, before anything is loaded or asked.

    Args:
        exchange: the sections.
        federation: the `[federation]` section.
        sends_extra: whether the algorithm's messages carry tensors beside the shared rules.

    Raises:
        SettingsError: names the keys and the remedy.
    """
    traffic, combine = exchange.traffic, exchange.combine
    if traffic.up == "int8" and traffic.content == "values":
        raise SettingsError('[traffic] up = "int8" would round whole rules: set content = "deltas", or up = "float16".')
    if sends_extra and not combine.is_plain:
        raise SettingsError(
            f'[federation] algorithm = "{federation.algorithm}" sends more than rules, which [combine] cannot bound: '
            'set rule = "mean" and norm-cap = 0, or another algorithm.'
        )
    if federation.quorum < combine.fewest:
        raise SettingsError(
            f'[combine] rule = "{combine.rule}" withstands attackers = {combine.attackers} only among '
            f"{combine.fewest} or more clients: set [federation] quorum to at least {combine.fewest}."
        )
