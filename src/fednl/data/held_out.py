"""Clients that only answer: which names `data.hold-out-clients` may hold, for every task."""

from __future__ import annotations

from collections.abc import Sequence

from fednl.data.settings import DataSettings
from fednl.errors import SettingsError


def check_held_out(settings: DataSettings, names: Sequence[str]) -> None:
    """Refuses a held-out client that does not take part, and a run in which nobody trains.

    Args:
        settings: the `[data]` section.
        names: all clients that take part, in their order.

    Raises:
        SettingsError: a held-out name is not among them, or all of them are held out.
    """
    for name in settings.hold_out_clients:
        if name not in names:
            known = f"{names[0]} to {names[-1]}" if len(names) > _LISTED else ", ".join(names)
            raise SettingsError(f'data.hold-out-clients names "{name}", which does not take part; choose from {known}.')
    if set(names) <= set(settings.hold_out_clients):
        raise SettingsError("data.hold-out-clients names every client, so that none trains; leave one out.")


_LISTED = 12
