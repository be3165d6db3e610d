"""Shows how far a run is: a live line on a terminal, a few plain lines anywhere else.

The display takes the events of the loop, dictionaries with `"event"` one of

- `"phase"`: a new stretch of work begins: its `name`, perhaps its `arm`, its `total` units of work, and how many of
  them were `done` before it;
- `"round-start"`: `arm`, `round` (from 1), `rounds`, `total` clients;
- `"step"`: `client`, `step` of `steps`, `loss`; `done` of `total` units of work of the phase or the arm;
- `"client-done"`: `client`, `loss`;
- `"round-end"`: `round`, `rounds`, `loss`, `seconds_s`;
- `"note"`: `text` for a person.

Every key but `"event"` may be missing. Nothing here knows what is trained.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

HEARTBEAT_S = 30.0
FIRST_SIGN_S = 2.0  # an error in a command's first moments stands alone on the screen


@dataclass
class _State:
    """What the last events said; time left is reckoned from `began_s`, `before` and `first_round`."""

    phase: str = ""
    arm: str = ""
    round: int = 0
    rounds: int = 0
    client: str = ""
    clients: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    done: float = 0.0
    total: float = 0.0
    before: float = 0.0
    began_s: float = 0.0
    first_round: int | None = None


class Progress:
    """Receives a run's events and shows them; use it as a context manager and pass it as `on_event`.

    Args:
        console: where to write; None is standard error.
        clock: seconds that only grow; for tests.
        heartbeat_s: without a terminal, the longest silence in seconds.

    Example:
        `with Progress() as on_event: fednl.training.train(config, path, on_event)`
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._started_s = self._spoke_s = clock()
        self._patience_s = min(FIRST_SIGN_S, heartbeat_s)
        self._state = _State(began_s=self._started_s)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._line, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            threading.Thread(target=self._beat, name="progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Takes one event; unknown kinds are ignored."""
        with self._lock:
            handler = {
                "phase": self._phase,
                "round-start": self._round_start,
                "step": self._step,
                "client-done": self._client_done,
                "round-end": self._round_end,
                "note": self._note,
            }.get(str(event.get("event", "")))
            if handler is not None:
                handler(event)

    def tick(self) -> None:
        """Without a terminal, says where the run is if nothing has been said for a while.

        The first sign comes after `FIRST_SIGN_S` seconds, the others after `heartbeat_s`.
        """
        with self._lock:
            if self._live is None and self._clock() - self._spoke_s >= self._patience_s:
                self._say(self._where(self._clock()) or "starting")

    def _phase(self, event: Mapping[str, Any]) -> None:
        name, arm = str(event.get("name") or event.get("text") or ""), str(event.get("arm", ""))
        total, before = float(event.get("total", 0)), float(event.get("done", 0))
        self._state = _State(phase=name, arm=arm, done=before, total=total, before=before, began_s=self._clock())
        self._say(name if arm in name else f"{arm}: {name}")

    def _round_start(self, event: Mapping[str, Any]) -> None:
        state = self._state
        arm, round = str(event.get("arm", state.arm)), int(event.get("round", 1))
        if arm != state.arm or state.first_round is None or round <= state.first_round:
            state.arm, state.began_s, state.first_round = arm, self._clock(), round
            state.done = state.total = state.before = 0.0
        state.round, state.rounds = round, int(event.get("rounds", 0))
        state.clients = int(event.get("total", 0))
        state.client, state.step, state.steps = "", 0, 0

    def _step(self, event: Mapping[str, Any]) -> None:
        state = self._state
        self._client_done(event)
        state.step, state.steps = int(event.get("step", state.step)), int(event.get("steps", state.steps))
        if "total" in event:
            state.done, state.total = float(event.get("done", 0)), float(event["total"])

    def _client_done(self, event: Mapping[str, Any]) -> None:
        self._state.client = str(event.get("client", self._state.client))
        self._take_loss(event)

    def _round_end(self, event: Mapping[str, Any]) -> None:
        state = self._state
        self._take_loss(event)
        state.round = int(event.get("round", state.round))
        state.rounds = int(event.get("rounds", state.rounds))
        state.total = state.total or float(state.rounds)
        state.done = state.total * state.round / max(1, state.rounds)
        state.client, state.step, state.steps = "", 0, 0
        parts = [f"{state.arm}: " if state.arm else "", f"round {state.round} of {state.rounds}"]
        parts.append(f", {state.clients} clients" if state.clients > 1 else "")
        parts.append(f", loss {state.loss:.3f}" if state.loss is not None else "")
        epsilon = event.get("metrics", {}).get("epsilon")
        parts.append(f", epsilon {epsilon:.3g}" if epsilon is not None else "")
        parts.append(f", rules unchanged ({event['reason']})" if event.get("reason") else "")
        parts.append(f", {duration(event['seconds_s'])}" if "seconds_s" in event else "")
        self._say("".join(parts) + self._left(self._clock()))

    def _note(self, event: Mapping[str, Any]) -> None:
        self._say(str(event.get("text") or event.get("message") or ""))

    def _take_loss(self, event: Mapping[str, Any]) -> None:
        loss = event.get("loss")
        if isinstance(loss, int | float):
            self._state.loss = float(loss)

    def _where(self, now: float) -> str:
        """One line: phase or arm, round, client, step, loss, time so far, time left."""
        state = self._state
        parts = [state.arm or state.phase]
        if state.rounds:
            parts.append(f"round {state.round} of {state.rounds}")
        if state.client:
            parts.append(f"client {state.client}")
        if state.steps:
            parts.append(f"step {state.step} of {state.steps}")
        if state.total and not state.rounds:
            parts.append(f"{state.done:g} of {state.total:g}")
        if state.loss is not None:
            parts.append(f"loss {state.loss:.3f}")
        text = ", ".join(part for part in parts if part)
        return f"{text}, {duration(now - state.began_s)} so far{self._left(now)}" if text else ""

    def _left(self, now: float) -> str:
        """The time left of this phase or arm at the pace so far; nothing while the pace is not known."""
        state = self._state
        # What was done before, by an earlier sitting or another phase, says nothing about the pace of this one.
        before = state.total * ((state.first_round or 1) - 1) / state.rounds if state.rounds else state.before
        done, left = state.done - before, state.total - state.done
        if done <= 0 or left <= 0:
            return ""
        return f", about {duration((now - state.began_s) / done * left)} left"

    def _line(self) -> Text:
        """The live line; what matters most stands first, as a narrow terminal cuts the end."""
        # No lock: the refresh thread must never wait for a handler that is itself printing.
        state, now = self._state, self._clock()
        parts = [state.arm or state.phase or "starting"]
        if state.rounds:
            parts.append(f"round {state.round}/{state.rounds}")
        elif state.total:
            parts.append(f"{state.done:g}/{state.total:g}")
        parts.append(self._left(now).removeprefix(", ") or f"{duration(now - state.began_s)} so far")
        if state.client:
            parts.append(state.client)
        if state.loss is not None:
            parts.append(f"loss {state.loss:.3f}")
        return Text("  " + " | ".join(parts), style="cyan", no_wrap=True, overflow="ellipsis")

    def _say(self, text: str) -> None:
        now = self._clock()
        self._spoke_s, self._patience_s = now, self._heartbeat_s
        self._console.print(Text(f"[{clock_time(now - self._started_s)}] {text}"))

    def _beat(self) -> None:
        while not self._stop.wait(min(1.0, self._heartbeat_s / 4)):
            self.tick()


def duration(seconds_s: float) -> str:
    """Writes a time for a person: `"8 s"`, `"3 min 20 s"`, `"2 h 5 min"`."""
    whole = max(0, round(seconds_s))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def clock_time(seconds_s: float) -> str:
    """Writes the time since the start as `minutes:seconds`, hours counted as minutes."""
    whole = max(0, int(seconds_s))
    return f"{whole // 60:3d}:{whole % 60:02d}"
