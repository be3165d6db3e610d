"""Refuses settings that nothing would read, before somebody relies on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fednl.errors import SettingsError

if TYPE_CHECKING:
    from fednl.federation.exchange import Exchange
    from fednl.federation.settings import FederationSettings
    from fednl.section import Section

_NOISE = ("epsilon", "clip", "noise-multiplier", "adaptive-clip", "clip-quantile", "delta", "noise-seed")
_MEAN = ("rule", "norm-cap", "max-examples")


def check_idle(federation: FederationSettings, exchange: Exchange, shares: bool) -> None:
    """Checks that what is not at its default has something to act on.

    Args:
        federation: the `[federation]` section.
        exchange: the sections `[traffic]`, `[combine]` and `[privacy]`.
        shares: whether clients share anything in one of the arms that are trained.

    Raises:
        SettingsError: names the first key that would do nothing, what it waits for, and the remedy.
    """
    traffic, combine, privacy = exchange.traffic, exchange.combine, exchange.privacy
    if not shares:
        why, remedy = f'algorithm = "{federation.algorithm}" lets nothing leave a client', "choose another algorithm"
        _refuse("privacy", privacy, (), why, remedy)
        _refuse("combine", combine, _MEAN, why, remedy)
    if privacy.mode == "none":
        _refuse("privacy", privacy, _NOISE, 'mode = "none" adds no noise', 'set mode = "central" or "local"')
    if not privacy.adaptive_clip:
        why = "adaptive-clip = false leaves the clip as it is"
        _refuse("privacy", privacy, ("clip-quantile",), why, "set adaptive-clip = true")
    if not privacy.secure:
        _refuse("privacy", privacy, ("secure-range",), "secure = false masks nothing", "set secure = true")
    if combine.rule == "mean":
        others = 'set rule = "trimmed-mean", "median" or "multi-krum"'
        _refuse("combine", combine, ("attackers",), 'rule = "mean" withstands none', others)
    if combine.rule != "mean" or combine.weights == "uniform":
        why = f'rule = "{combine.rule}" with weights = "{combine.weights}" counts every client once'
        _refuse("combine", combine, ("max-examples",), why, 'set rule = "mean" and weights = "examples"')
    if traffic.up != "int8":
        why = f'up = "{traffic.up}" carries no rounding on'
        _refuse("traffic", traffic, ("error-feedback",), why, 'set up = "int8"')
    if not federation.deadline_s:
        why = "deadline-s = 0 waits for as long as it takes"
        _refuse("federation", federation, ("warm-up-s",), why, "set deadline-s")
    if not federation.quarantine_after:
        why = "quarantine-after = 0 leaves no client out"
        _refuse("federation", federation, ("quarantine-rounds",), why, "set quarantine-after")


def _refuse(name: str, section: Section, keys: Sequence[str], why: str, remedy: str) -> None:
    """Refuses a section in which one of these keys, or any without keys, is not at its default."""
    changed = section.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for key in keys or changed:
        if key in changed:
            value = json.dumps(changed[key])
            raise SettingsError(f"[{name}] {key} = {value}, but {why}: leave {key} out, or {remedy}.")
