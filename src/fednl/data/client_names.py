"""What clients are called, and which of them are held out: the same for every task."""

from __future__ import annotations

from collections.abc import Sequence

from fednl.data.settings import DataSettings
from fednl.errors import SettingsError

_WIDTH = 2  # so that a tenth client changes no name, and with it no random stream, of the nine before it


def numbered_clients(number: int) -> list[str]:
    """Names clients that are no kinds of data themselves: `client-01`, `client-02`, and so on.

    The order of names is the order of numbers.

    Args:
        number: how many, at least 1.
    """
    width = max(_WIDTH, len(str(number)))
    return [f"client-{place:0{width}}" for place in range(1, number + 1)]


def check_held_out(settings: DataSettings, names: Sequence[str]) -> None:
    """Refuses a held-out client that does not take part.

    Args:
        settings: the `[data]` section.
        names: the clients that take part, at least one.

    Raises:
        SettingsError: a name is none of them.
    """
    for name in settings.hold_out_clients:
        if name not in names:
            few = ", ".join(names) if len(names) <= 9 else f"{names[0]} to {names[-1]}"
            raise SettingsError(f'data.hold-out-clients names "{name}", which does not take part; choose from {few}.')
