"""Haystacks: needles placed at chosen depths between pieces of filler, to an exact number of tokens.

Everything is tokenised piece by piece and joined as ids, so a span is exact for every tokenizer.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fednl.data.examples import Encoded, Event, NeedleExample
from fednl.errors import DataError, SettingsError

# Where the first and the last event stand, as fractions of the filler. Source: FedNL, appendix C.3.
FIRST_FRACTION, LAST_FRACTION = 0.10, 0.70
# The first tokens of a row stay visible as attention sinks, so no event may stand there.
LEAD_TOKENS = 8
GAP_TOKENS = 4
_SNAP_FRACTION, _SNAP_TOKENS = 0.05, 32
_TRIES = 200


def tokens_needed(encoded: Encoded, window_tokens: int) -> int:
    """The smallest prompt that holds an example's events outside the window that answers it.

    Args:
        encoded: the example.
        window_tokens: the attention window, 0 for full attention.
    """
    gaps = LEAD_TOKENS + GAP_TOKENS * (len(encoded.events) - 1)
    return max(len(encoded.question), window_tokens) + encoded.event_tokens + gaps


def check_budget(
    encoded: Iterable[Encoded], tokens: int, window_tokens: int, answer: str, key: str = "data.tokens"
) -> None:
    """Refuses a window or a token budget in which some example cannot be asked.

    Args:
        encoded: every example of the task.
        tokens: prompt tokens per example (`data.tokens`).
        window_tokens: the attention window, 0 for full attention (`memory.window-tokens`).
        answer: the answer format, for the remedy.
        key: what the budget is called, for the message.

    Raises:
        SettingsError: with the smallest value that works for these examples.
    """
    examples = list(encoded)
    window_needed = max((one.window_needed for one in examples), default=0)
    if 0 < window_tokens < window_needed:
        holds, remedy = "the question and the longest answer", ""
        if answer == "letters":
            holds, remedy = "the question and its four options", ', or set evaluation.answer to "candidates"'
        raise SettingsError(
            f"memory.window-tokens is {window_tokens} and cannot hold {holds};"
            f" set it to at least {window_needed}, or to 0 for full attention{remedy}."
        )
    smallest = max((tokens_needed(one, window_tokens) for one in examples), default=0)
    if tokens < smallest:
        most = max(len(one.events) for one in examples)
        raise SettingsError(
            f"{key} is {tokens} and cannot hold {most} events, and after them the question and"
            f" {window_tokens} tokens of window; set it to at least {smallest}, or lower data.events or"
            " memory.window-tokens."
        )


@dataclass(frozen=True)
class Region:
    """A contiguous stretch of tokenised filler.

    Attributes:
        ids: its tokens.
        starts: the first token of each sentence, ascending, beginning with 0.
        sentences: the sentences' texts.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    sentences: tuple[str, ...]

    def text(self, start: int, end: int) -> str:
        """The sentences that the tokens from `start` up to `end` touch, whole."""
        first = bisect_right(self.starts, start) - 1
        return " ".join(self.sentences[first : bisect_left(self.starts, end)])

    def part(self, first: int, last: int) -> Region:
        """The sentences from number `first` up to `last`, as a text of their own."""
        offsets = (*self.starts, len(self.ids))
        base = offsets[first]
        return Region(
            self.ids[base : offsets[last]],
            tuple(start - base for start in self.starts[first:last]),
            self.sentences[first:last],
        )

    def draw(self, length: int, avoid: Sequence[str], rng: random.Random) -> int:
        """Picks where a slice begins: at a random sentence, such that no text of `avoid` is in it.

        Raises:
            DataError: no slice was found that is free of them.
        """
        usable = bisect_right(self.starts, len(self.ids) - length)
        for _ in range(_TRIES):
            start = self.starts[rng.randrange(usable)]
            text = self.text(start, start + length)
            if not any(value in text for value in avoid):
                return start
        raise DataError(
            f"the filler holds the needles' own values almost everywhere ({_TRIES} slices tried);"
            " name another text in data.filler."
        )


def place(
    encoded: Encoded,
    region: Region,
    tokens: int,
    window_tokens: int,
    rng: random.Random,
    *,
    client: str,
    split: str,
    index: int,
) -> NeedleExample:
    """Puts the events into filler at their depths and the question at the end.

    The events must fit (`check_budget`), and every event ends at least `window_tokens` before the answer.

    Args:
        encoded: the events, question and answers.
        region: the filler of this split.
        tokens: length of the prompt.
        window_tokens: the attention window, 0 for full attention.
        rng: where in the region the slice begins.
        client: recorded in the example.
        split: recorded in the example.
        index: recorded in the example.
    """
    haystack = tokens - len(encoded.question)
    filler_tokens = haystack - encoded.event_tokens
    start = region.draw(haystack, encoded.needle.unique, rng)
    filler = region.ids[start : start + filler_tokens]
    spare = region.ids[start + filler_tokens : start + haystack]
    room = filler_tokens - max(0, window_tokens - len(encoded.question))
    cuts = _cuts(len(encoded.events), filler_tokens, room, region, start)
    prompt: list[int] = []
    removed: list[int] = []
    events: list[Event] = []
    used = before = 0
    for text, ids, cut in zip(encoded.needle.events, encoded.events, cuts, strict=True):
        prompt += filler[before:cut]
        removed += filler[before:cut]
        first = len(prompt)
        events.append(Event(text, first, first + len(ids), first / haystack))
        prompt += ids
        removed += spare[used : used + len(ids)]
        used, before = used + len(ids), cut
    tail = filler[before:] + encoded.question
    return NeedleExample(
        client=client,
        split=split,
        index=index,
        prompt_ids=(*prompt, *tail),
        question_start=haystack,
        candidates=encoded.candidates,
        candidate_ids=encoded.candidate_ids,
        gold=encoded.needle.gold,
        events=tuple(events),
        queried=encoded.needle.queried,
        removed_ids=(*removed, *tail),
        further=encoded.further,
    )


def fractions(events: int) -> list[float]:
    """Where the events stand in the filler: {0.10, 0.30, 0.50, 0.70} for four, evenly between for others.

    Source: FedNL, appendix C.3; a single event stands at the middle of the range (ours).
    """
    if events == 1:
        return [(FIRST_FRACTION + LAST_FRACTION) / 2]
    step = (LAST_FRACTION - FIRST_FRACTION) / (events - 1)
    return [FIRST_FRACTION + step * i for i in range(events)]


def _cuts(count: int, filler_tokens: int, room: int, region: Region, start: int) -> list[int]:
    """Filler tokens that come before each event: at its fraction, moved to a sentence's start if one is near.

    Where the window reaches further back than the last fraction, all fractions shrink alike.
    """
    wanted = fractions(count)
    shrink = min(1.0, room / (wanted[-1] * filler_tokens))
    near = min(_SNAP_TOKENS, int(_SNAP_FRACTION * filler_tokens * shrink))
    cuts: list[int] = []
    for i, fraction in enumerate(wanted):
        cut = _nearest(region.starts, start + round(fraction * filler_tokens * shrink), near) - start
        low = cuts[-1] + GAP_TOKENS if cuts else LEAD_TOKENS
        high = room - GAP_TOKENS * (count - 1 - i)
        cuts.append(min(max(cut, low), high))
    return cuts


def _nearest(starts: Sequence[int], target: int, near: int) -> int:
    at = bisect_left(starts, target)
    around = [s for s in starts[max(0, at - 1) : at + 1] if abs(s - target) <= near]
    return min(around, key=lambda s: abs(s - target), default=target)
