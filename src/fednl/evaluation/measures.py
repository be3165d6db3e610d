"""What is measured of each task: metrics, their words in a report, and which arms are compared. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A number made of outcomes.

    Attributes:
        title: the heading of its table.
        short: its name in a sentence.
        field: what it reads of an outcome.
        kind: `"share"` (of right outcomes), `"loss"` (a mean, lower is better), or `"f1"` (over all clients' answers
            together, so that a class that few have counts as much as the others).
        has_chance: guessing gets one in as many as there are candidates.
    """

    title: str
    short: str
    field: str
    kind: Literal["share", "loss", "f1"]
    has_chance: bool = False

    @property
    def column(self) -> str:
        """Its heading in a table of several metrics."""
        return "nats/token" if self.kind == "loss" else f"{self.short}, %"

    @property
    def higher_is_better(self) -> bool:
        """Whether more of it is better: of everything but a loss."""
        return self.kind != "loss"

    @property
    def scale(self) -> float:
        """What a value is multiplied with to be written: a loss is written as it is, the others in percent."""
        return 1.0 if self.kind == "loss" else 100.0

    @property
    def form(self) -> str:
        """How a written value is rounded, as `format` takes it."""
        return ".2f" if self.kind == "loss" else ".1f"

    @property
    def gap_unit(self) -> str:
        """The unit of a difference between two arms, as it is written."""
        return "nats/token" if self.kind == "loss" else "pp"


METRICS: dict[str, Metric] = {
    "candidates": Metric("Right candidate of four, %", "candidates", "correct", "share", has_chance=True),
    "accuracy": Metric("Accuracy, %", "accuracy", "correct", "share", has_chance=True),
    "macro_f1": Metric("Macro-F1 over all clients' answers, %", "macro-F1", "chosen", "f1"),
    "recall": Metric("Exact recall, %", "recall", "recall", "share"),
    "nats_per_token": Metric(
        "Cross-entropy of the right answer, nats/token (lower is better)", "nats per token", "nats_per_token", "loss"
    ),
    "text_nats_per_token": Metric(
        "Cross-entropy of the text, nats/token (lower is better)", "nats per token of text", "nats_per_token", "loss"
    ),
}
"""Every metric, in the order of the tables."""


@dataclass(frozen=True)
class Measure:
    """What a comparison on one task shows.

    Attributes:
        metrics: names in `METRICS`, the one that says how often an answer is right first.
        arms: names in `ARMS` that the task has.
        pairs: which arms are compared, first minus second, where both were measured.
        validates_answers: validation after each round answers the questions too, for accuracy beside the loss.
    """

    metrics: tuple[str, ...]
    arms: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    validates_answers: bool = False

    def metrics_of(self, answer: str) -> tuple[str, ...]:
        """Its metrics where answers have a form (`evaluation.answer`): a letter is chosen, so nothing is recalled."""
        return tuple(metric for metric in self.metrics if answer != "letters" or metric != "recall")


def _against(first: str, *others: str) -> tuple[tuple[str, str], ...]:
    return tuple((first, other) for other in others)


NEEDLES = Measure(
    metrics=("candidates", "recall", "nats_per_token"),
    arms=(
        "full-attention",
        "window-only",
        "public-rules",
        "federated-lora",
        "federated",
        "state-zeroed",
        "events-removed",
        "local-only",
        "pooled",
    ),
    pairs=_against(
        "federated",
        "window-only",
        "public-rules",
        "federated-lora",
        "state-zeroed",
        "events-removed",
        "local-only",
        "pooled",
        "full-attention",
    ),
)
CLASSIFICATION = Measure(
    metrics=("accuracy", "macro_f1", "nats_per_token"),
    arms=("zero-shot", "window-only", "local-icl", "federated-lora", "federated", "local-only", "pooled"),
    pairs=_against("federated", "zero-shot", "window-only", "local-icl", "federated-lora", "local-only", "pooled"),
    validates_answers=True,
)
MMLU = Measure(
    metrics=("accuracy", "nats_per_token"),
    arms=("full-attention", "window-only", "public-rules", "federated-lora", "federated", "local-only", "pooled"),
    pairs=_against(
        "federated", "full-attention", "window-only", "public-rules", "federated-lora", "local-only", "pooled"
    ),
)
TEXT = Measure(
    metrics=("text_nats_per_token",),
    arms=("full-attention", "window-only", "public-rules", "federated-lora", "federated", "local-only", "pooled"),
    pairs=_against(
        "federated", "full-attention", "window-only", "public-rules", "federated-lora", "local-only", "pooled"
    ),
)

# What is measured of a new task is one line here.
MEASURES: dict[str, Measure] = {
    "needles": NEEDLES,
    "public": NEEDLES,
    "mmlu": MMLU,
    "text": TEXT,
    "classification": CLASSIFICATION,
}
"""By task."""
