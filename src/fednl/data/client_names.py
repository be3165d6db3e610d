"""What clients are called that are no kinds of data themselves: the same for every task."""

from __future__ import annotations

RESERVED = frozenset({"pooled", "macro", "worst", "spread", "head", "middle", "tail"})
"""What runs and tables call other things than a client: the pooled learner, averages, groups of clients."""
_WIDTH = 2  # so that a tenth client changes no name, and with it no random stream, of the nine before it


def numbered_clients(number: int) -> list[str]:
    """Names clients that are no kinds of data themselves: `client-01`, `client-02`, and so on.

    The order of names is the order of numbers.

    Args:
        number: how many, at least 1.
    """
    width = max(_WIDTH, len(str(number)))
    return [f"client-{place:0{width}}" for place in range(1, number + 1)]
