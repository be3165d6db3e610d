"""Which names clients may have, and `data.hold-out-clients` may hold, for every task."""

from __future__ import annotations

from collections.abc import Sequence

from fednl.data.client_names import RESERVED
from fednl.data.settings import DataSettings
from fednl.errors import SettingsError


def check_clients(settings: DataSettings, names: Sequence[str]) -> None:
    """Refuses a client called by a word of the tables, a held-out one that does not take part, a run of held-out ones.

    Args:
        settings: the `[data]` section.
        names: all clients that take part, in their order.

    Raises:
        SettingsError: a name is reserved, a held-out one is not among them, or all of them are held out.
    """
    for name in RESERVED.intersection(names):
        raise SettingsError(f'a client would be called "{name}", which tables call something else: rename its source.')
    for name in settings.hold_out_clients:
        if name not in names:
            known = f"{names[0]} to {names[-1]}" if len(names) > _LISTED else ", ".join(names)
            raise SettingsError(f'data.hold-out-clients names "{name}", which does not take part; choose from {known}.')
    if set(names) <= set(settings.hold_out_clients):
        raise SettingsError("data.hold-out-clients names every client, so that none trains; leave one out.")


_LISTED = 12
