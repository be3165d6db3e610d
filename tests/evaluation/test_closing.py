from __future__ import annotations

import pytest

from fednl.evaluation.closing import NO_WIDTH, NOT_APART, WORSE, share_closed
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.rows import result_rows
from fednl.evaluation.statistics import Interval, told_ends

FLOOR = {"a": [0.0, 1.0, 0.0, 0.0] * 10, "b": [0.0] * 40}
CEILING = {"a": [1.0] * 40, "b": [1.0, 1.0, 1.0, 0.0] * 10}


def test_floor_is_zero_ceiling_is_one_and_the_middle_is_a_half() -> None:
    for ours, share in ((FLOOR, 0.0), (CEILING, 1.0)):
        closed = share_closed(ours, FLOOR, CEILING, seed=0, shares=True)
        assert isinstance(closed, Interval)
        assert (closed.value, closed.low, closed.high, closed.n) == (share, share, share, 80)
    half = {name: [(x + y) / 2 for x, y in zip(FLOOR[name], CEILING[name], strict=True)] for name in FLOOR}
    middle = share_closed(half, FLOOR, CEILING, seed=0, shares=True)
    assert isinstance(middle, Interval)
    assert (middle.value, middle.low, middle.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_loss_gives_the_share_of_its_negative_and_none_where_the_ceiling_is_worse() -> None:
    ours = {"a": [0.0, 1.0, 1.0, 0.0] * 10, "b": [1.0, 0.0] * 20}
    negative = [{name: [-x for x in values] for name, values in part.items()} for part in (ours, FLOOR, CEILING)]
    share = share_closed(*negative, 3, shares=False)
    assert isinstance(share, Interval)
    # Of the same numbers as losses, the ceiling has more of them than the floor: there is no way down to it.
    assert share_closed(ours, FLOOR, CEILING, 3, shares=False) == WORSE
    assert share_closed(ours, CEILING, FLOOR, 3, shares=True) == WORSE
    turned = share_closed(ours, CEILING, FLOOR, 3, shares=False)
    assert isinstance(turned, Interval) and turned.value == pytest.approx(1 - share.value)
    # By hand: ours averages (0.5 + 0.5) / 2, the floor (0.25 + 0) / 2, the ceiling (1 + 0.75) / 2.
    assert share.value == pytest.approx((0.5 - 0.125) / (0.875 - 0.125))
    assert share.low < share.value < share.high


def test_where_nothing_varies_the_share_has_no_interval() -> None:
    for ours in (FLOOR, CEILING):
        closed = share_closed(ours, FLOOR, CEILING, seed=0, shares=True)
        assert isinstance(closed, Interval) and told_ends(closed) == {}
    closed = share_closed({**CEILING, "b": [1.0, 1.0, 0.0, 0.0] * 10}, FLOOR, CEILING, seed=0, shares=True)
    assert isinstance(closed, Interval) and told_ends(closed)["low"] < closed.value < 1.0


@pytest.mark.parametrize(("wins", "told"), [(4, False), (5, False), (6, True)])
def test_a_way_is_there_where_the_table_tells_its_ends_apart(wins: int, told: bool) -> None:
    """Four wins and no loss of 105 push a bootstrap off zero; the table's test does not tell them from coins."""
    floor = {str(client): [0.0] * 10 + [1.0] * 5 for client in range(7)}
    ceiling = {name: [float(int(name) < wins), *values[1:]] for name, values in floor.items()}
    found = share_closed(floor, floor, ceiling, seed=0, shares=True)
    assert isinstance(found, Interval) if told else found == NOT_APART
    answered = [
        [Outcome(name, i, 0, 0, bool(x), bool(x), 1.0, 0.0, 1) for name, xs in arm.items() for i, x in enumerate(xs)]
        for arm in (ceiling, floor)
    ]
    rows = result_rows({"c": answered[0], "f": answered[1]}, seed=0, metrics=["candidates"], pairs=[("c", "f")])
    assert next(row["verdict"] == "better" for row in rows if row["metric"] == "difference") == told
    # As losses, with whatever test losses have: a way with an interval without 0.
    assert isinstance(share_closed(ceiling, ceiling, floor, seed=0, shares=False), Interval)


def test_there_is_no_share_of_a_way_that_is_not_there() -> None:
    noise = {"a": [1.0, 0.0] * 20, "b": [0.0, 1.0] * 20}
    swapped = {"a": [0.0, 1.0] * 20, "b": [1.0, 0.0] * 20}
    assert share_closed(CEILING, noise, swapped, seed=0, shares=True) == NOT_APART


def test_answers_need_two_of_a_client_and_losses_three() -> None:
    """Twenty clients of two questions each, none right at the floor and all at the ceiling: the way is plain."""
    floor, ceiling, ours = ({str(client): pair for client in range(20)} for pair in ([0.0] * 2, [1.0] * 2, [1.0, 0.0]))
    share = share_closed(ours, floor, ceiling, seed=0, shares=True)
    assert isinstance(share, Interval) and share.value == 0.5 and told_ends(share)["low"] < 0.5
    few = share_closed(ours, ceiling, floor, seed=0, shares=False)
    assert few == "a client has fewer than 3 outcomes, which are too few to vary"
    one = [{name: pair[:1] for name, pair in arm.items()} for arm in (ours, floor, ceiling)]
    assert share_closed(*one, seed=0, shares=True) == "a client has fewer than 2 outcomes, which are too few to vary"
    still = [{"a": [nats] * 9} for nats in (1.0, 2.0, 0.5)]
    assert share_closed(*still, seed=0, shares=False) == NO_WIDTH


def test_other_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="same clients"):
        share_closed(FLOOR, FLOOR, {"a": CEILING["a"]}, seed=0, shares=True)
    with pytest.raises(ValueError):
        share_closed({"a": [1.0], "b": [1.0]}, FLOOR, CEILING, seed=0, shares=True)
