"""The `[evaluation]` section: which answers are scored and which arms are measured. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from fednl.section import Section

Arm = Literal[
    "full-attention",
    "zero-shot",
    "local-icl",
    "window-only",
    "public-rules",
    "federated-lora",
    "federated",
    "state-zeroed",
    "events-removed",
    "local-only",
    "pooled",
]

ARMS: dict[str, str] = {
    "full-attention": "full attention",
    "zero-shot": "zero-shot",
    "local-icl": "in-context learning from own demonstrations",
    "window-only": "window only",
    "public-rules": "public rules alone",
    "federated-lora": "FedAvg-LoRA, window, no memory",
    "federated": "federated rules",
    "state-zeroed": "state zeroed at the question",
    "events-removed": "events removed",
    "local-only": "local-only rules",
    "pooled": "rules trained on pooled data",
}
"""Every arm a comparison can have, in the order of the tables, with the words a report uses for it."""


class EvaluationSettings(Section):
    """Says how an answer is scored, which arms of the comparison are measured, and how many examples at once.

    Args:
        answer: `"candidates"` (the likeliest of four candidate texts, length-normalised), `"recall"` (greedy
            generation, exact match) or `"letters"` (the options stand in the question, a letter is scored).
        arms: the arms to measure, from `ARMS`, each at most once. `"state-zeroed"` and `"events-removed"` use
            the federated rules.
        clients: whose test questions are asked; empty for everybody's.
        batch: examples per forward pass, at least 1; changes speed and memory, not results.

    Source: arms and answer formats ours; four-choice needles from arXiv 2605.16350, appendix C.3.
    """

    answer: Literal["candidates", "recall", "letters"] = "candidates"
    # A TOML array arrives as a list, which strict mode would refuse for a tuple.
    arms: tuple[Arm, ...] = Field(
        default=("full-attention", "window-only", "federated", "state-zeroed", "events-removed"), strict=False
    )
    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    clients: tuple[str, ...] = Field(default=(), strict=False)
    batch: int = Field(default=8, ge=1)

    @field_validator("arms")
    @classmethod
    def _each_arm_once(cls, value: tuple[Arm, ...]) -> tuple[Arm, ...]:
        if len(set(value)) != len(value):
            raise ValueError("name each arm once")
        return value
