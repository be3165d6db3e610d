"""Whether a run under noise may have another round."""

from __future__ import annotations

from fednl.errors import FednlError, SettingsError
from fednl.federation.accounting import spent_epsilon
from fednl.federation.privacy import PrivateRound
from fednl.federation.record import Federation, Point


def private_round(fed: Federation, point: Point) -> PrivateRound | None:
    """Gives the next round under noise; None without.

    Args:
        fed: the federation.
        point: where the run stands before the round.
    """
    if point.spent is None:
        return None
    clients, planned, number = fed.transport.clients(), fed.asked_per_round, point.round + 1
    return PrivateRound(fed.exchange.privacy, point.spent, clients, planned, number, point.attempt)


def budget_is_spent(fed: Federation, point: Point) -> bool:
    """Says, also to who listens, whether the next round would cost more than the budget.

    Args:
        fed: the federation.
        point: where the run stands before the round.

    Raises:
        SettingsError: the budget is too small for any round.
        FednlError: rounds that failed, and were taken back, have spent it before any counted.
    """
    settings, private = fed.exchange.privacy, private_round(fed, point)
    if point.spent is None or private is None or not settings.epsilon or (cost := private.cost()) <= settings.epsilon:
        return False
    spent = spent_epsilon(settings, point.spent)
    if point.round == 0 and spent:
        raise FednlError(
            f"[privacy] epsilon = {settings.epsilon:g}, of which rounds that failed have spent {spent:.3g}, and the "
            f"next would make it {cost:.3g}: no round has counted, so start a new run with a larger budget."
        )
    if point.round == 0:
        raise SettingsError(
            f"[privacy] epsilon = {settings.epsilon:g}, but the first round alone costs {cost:.3g}: raise "
            "noise-multiplier or the budget."
        )
    fed.tell(
        "note",
        text=f"stopped after round {point.round} of {fed.training.rounds}, as the next would make epsilon {cost:.3g}, "
        f"more than the budget of {settings.epsilon:g}",
    )
    return True
