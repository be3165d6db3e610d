from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from fednl.progress import Progress, duration


class Clock:
    """A clock that a test turns by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def shown(clock: Clock, terminal: bool = False) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False, legacy_windows=False)
    return Progress(console, clock), out


def play(progress: Progress, clock: Clock, rounds: int = 4, first: int = 1, step_s: float = 5.0) -> None:
    """What the loop says: two clients, two steps each."""
    steps = rounds * 4
    for round in range(first, rounds + 1):
        progress({"event": "round-start", "arm": "federated", "round": round, "rounds": rounds, "total": 2})
        for number, (client, step) in enumerate([("law", 1), ("law", 2), ("med", 1), ("med", 2)], 1):
            clock.now_s += step_s
            facts = {"client": client, "step": step, "steps": 2, "loss": 3.0 - round / 10, "round": round}
            done = (round - 1) * 4 + number
            progress({"event": "step", "arm": "federated", "rounds": rounds, "done": done, "total": steps, **facts})
        progress({"event": "client-done", "client": "med", "done": 2, "total": 2})
        progress({"event": "round-end", "round": round, "rounds": rounds, "loss": 2.5, "seconds_s": 4 * step_s})
        if round < rounds and round == first:
            return


def test_without_a_terminal_one_line_a_phase_and_a_round() -> None:
    clock = Clock()
    progress, out = shown(clock)
    progress({"event": "phase", "name": "loading the backbone"})
    clock.now_s += 70
    progress({"event": "phase", "name": "training: federated", "arm": "federated"})
    play(progress, clock)
    assert out.getvalue().splitlines() == [
        "[  0:00] loading the backbone",
        "[  1:10] training: federated",
        "[  1:30] federated: round 1 of 4, 2 clients, loss 2.500, 20 s, about 1 min 0 s left",
    ]


def test_a_round_that_changed_nothing_says_why() -> None:
    progress, out = shown(Clock())
    progress({"event": "round-start", "arm": "federated", "round": 1, "rounds": 1, "total": 1})
    progress({"event": "round-end", "round": 1, "rounds": 1, "updated": False, "reason": "no client has examples"})
    assert out.getvalue() == "[  0:00] federated: round 1 of 1, rules unchanged (no client has examples)\n"


def test_a_long_silence_is_broken() -> None:
    clock = Clock()
    progress, out = shown(clock)
    progress({"event": "phase", "name": "training", "arm": "federated"})
    progress({"event": "round-start", "arm": "federated", "round": 2, "rounds": 4, "total": 2})
    clock.now_s += 29
    progress.tick()
    assert len(out.getvalue().splitlines()) == 1
    progress({"event": "step", "client": "law", "step": 1, "steps": 2, "loss": 1.5, "done": 5, "total": 16})
    clock.now_s += 1
    progress.tick()
    progress.tick()
    (_, line) = out.getvalue().splitlines()
    assert line.startswith("[  0:30] federated, round 2 of 4, client law, step 1 of 2, loss 1.500, ")
    assert line.endswith(", 30 s so far, about 5 min 30 s left")


def test_the_first_sign_of_life_comes_soon_and_not_at_once() -> None:
    clock = Clock()
    progress, out = shown(clock)
    clock.now_s += 1.9
    progress.tick()
    assert out.getvalue() == ""
    clock.now_s += 0.2
    progress.tick()
    clock.now_s += 29
    progress.tick()
    assert out.getvalue() == "[  0:02] starting\n"
    clock.now_s += 1.1
    progress.tick()
    assert out.getvalue().count("\n") == 2


def test_the_heartbeat_beats_by_itself() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=200), heartbeat_s=0.05) as progress:
        progress({"event": "phase", "name": "loading"})
        end = time.monotonic() + 10
        while out.getvalue().count("\n") < 3 and time.monotonic() < end:
            time.sleep(0.02)
    assert out.getvalue().count("loading") >= 3


def test_a_resumed_run_reckons_with_its_own_pace() -> None:
    clock = Clock()
    progress, _ = shown(clock)
    play(progress, clock, rounds=10, first=9, step_s=5.0)
    assert progress._left(clock.now_s) == ", about 20 s left"


def test_a_new_arm_starts_its_own_reckoning() -> None:
    clock = Clock()
    progress, _ = shown(clock)
    play(progress, clock, rounds=2, first=1)
    clock.now_s += 500
    progress({"event": "round-start", "arm": "lora", "round": 1, "rounds": 2, "total": 2})
    clock.now_s += 10
    progress({"event": "step", "client": "law", "step": 1, "steps": 2, "done": 1, "total": 4})
    assert progress._left(clock.now_s) == ", about 30 s left"


def test_measuring_counts_examples() -> None:
    clock = Clock()
    progress, _ = shown(clock)
    progress({"event": "phase", "name": "measuring: federated", "arm": "federated", "total": 105})
    clock.now_s += 10
    progress({"event": "step", "arm": "federated", "client": "law", "done": 21, "total": 105})
    assert progress._where(clock.now_s) == ("federated, client law, 21 of 105, 10 s so far, about 40 s left")


def test_what_was_done_before_a_phase_says_nothing_about_its_pace() -> None:
    clock = Clock()
    progress, out = shown(clock)
    progress({"event": "phase", "name": "reading text 2", "arm": "federated", "done": 600, "total": 1000})
    clock.now_s += 60
    progress({"event": "step", "arm": "federated", "done": 700, "total": 1000})
    progress.tick()
    assert out.getvalue().splitlines()[-1] == "[  1:00] federated, 700 of 1000, 1 min 0 s so far, about 3 min 0 s left"


def test_on_a_terminal_the_line_is_live_and_rounds_stay() -> None:
    clock = Clock()
    progress, out = shown(clock, terminal=True)
    with progress:
        play(progress, clock)
        progress({"event": "note", "text": "client med sent NaN and was left out"})
        progress({"event": "step", "client": "a-client-with-a-long-name", "done": 6, "total": 16})
        clock.now_s += 10
        line = progress._line().plain
        assert line == "  federated | round 1/4 | about 50 s left | a-client-with-a-long-name | loss 2.500"
    text = out.getvalue()
    assert "federated: round 1 of 4" in text
    assert "client med sent NaN and was left out" in text


@pytest.mark.parametrize(
    "event",
    [{}, {"event": "unheard-of"}, {"event": "step"}, {"event": "round-start"}, {"event": "round-end"}]
    + [{"event": "client-done"}, {"event": "phase"}, {"event": "note"}, {"event": "step", "loss": None}],
)
def test_no_event_breaks_the_display(event: dict[str, Any]) -> None:
    progress, _ = shown(Clock())
    progress(event)
    progress._line()


def test_markup_in_a_name_is_text() -> None:
    clock = Clock()
    progress, out = shown(clock)
    progress({"event": "note", "text": "client [bold]x[/bold] [/]"})
    assert "client [bold]x[/bold] [/]" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds_s", "words"),
    [(0, "0 s"), (-3, "0 s"), (59.6, "1 min 0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_read_well(seconds_s: float, words: str) -> None:
    assert duration(seconds_s) == words


def test_epsilon_stands_beside_the_loss_of_each_round() -> None:
    clock = Clock()
    progress, out = shown(clock)
    progress({"event": "round-start", "arm": "federated", "round": 1, "rounds": 2, "total": 2})
    progress({"event": "round-end", "round": 1, "rounds": 2, "metrics": {"epsilon": 2.25}, "seconds_s": 4.0})
    assert "round 1 of 2, 2 clients, epsilon 2.25, 4 s" in out.getvalue()
