"""The `[training]` and `[federation]` sections: how clients train and how rounds go. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fednl.federation.groups import check_words
from fednl.section import Section

PACES = {"minutes": (600.0, 1800.0), "hours": (4 * 3600.0, 3600.0), "days": (3 * 86400.0, 4 * 3600.0)}
"""Deadline and warm-up by pace, in seconds."""


class TrainingSettings(Section):
    """What every client does in every round; the same for every method that is compared.

    Args:
        rounds: how many rounds the run has; at least 1.
        local_steps: optimiser steps of a client in one round; at least 1.
        batch: examples per step; a client with fewer examples takes smaller batches.
        local_lr: AdamW's learning rate; above 0.
        schedule: `"constant"`, or `"cosine"` from `local_lr` down to 0 over all steps of the run.
        warmup_steps: the first steps of the whole run, in which the rate rises linearly; 0 for none.
        optimizer_state: `"keep"` carries AdamW's moments over rounds, `"reset"` starts each round anew.
        clip: largest L2 norm of a step's gradient over all trained tensors; 0 for no limit.

    Source: ours, as the paper states neither optimiser nor schedule.
    """

    rounds: int = Field(default=4, ge=1)
    local_steps: int = Field(default=8, ge=1)
    batch: int = Field(default=4, ge=1)
    local_lr: float = Field(default=3e-3, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    optimizer_state: Literal["keep", "reset"] = "keep"
    clip: float = Field(default=1.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        total = self.rounds * self.local_steps
        if self.warmup_steps >= total and self.warmup_steps > 0:
            raise ValueError(f"warmup-steps = {self.warmup_steps}, but the run has {total} steps: use fewer")
        return self


Adapter = Literal["memory", "lora", "context-vectors"]


class FederationSettings(Section):
    """Who is asked in a round, what travels, and when a round counts.

    The key `preset`, which is replaced when settings are read, stands for the settings of a published method, a name in
    `fednl.federation.algorithms.PRESETS`; settings beside it win.

    Args:
        adapters: what is trained: `"memory"`, `"lora"`, `"context-vectors"`, or a list of these; with memory a LoRA
            whose `[lora] rank` is not 0 is trained too.
        algorithm: a name in `fednl.federation.algorithms.ALGORITHMS`.
        shared: what leaves a client: a preset (`"memory"`, `"theta"`, `"lora"`, `"context"`, `"all"`), or a list of
            groups and name patterns. Everything else stays private to each client.
        lora_ranks: clients whose LoRA has a lower rank than `lora.rank`, as `"PATTERN=RANK"`; the first shell-style
            pattern that fits a client's name counts, and the others have `lora.rank`. A component is averaged over
            those who have it.
        clients_per_round: how many clients are asked in a round, drawn by seed; 0 asks all.
        quorum: how many valid replies a round needs to change the model; clients without examples count.
        pace: how long a client may take, in one word for both times below: `"patient"` leaves them as they are set,
            `"minutes"` gives it 10 and 30 more in the first round, `"hours"` 4 and 1 more, `"days"` 3 and 4 hours more.
        deadline_s: seconds that a client has in a round, on this machine from when its turn comes; 0 for no deadline. A
            late client does not count; one that hangs is ended in a worker process only (`parallel_clients` above 1).
        warm_up_s: seconds that it has beyond the deadline in the first round of a sitting, as it loads its model.
        parallel_clients: worker processes on this machine; changes speed, not results. With 1 there is none: this
            process trains, and waits for a client that is past its deadline until it ends.
        keep_checkpoints: how many of the newest round checkpoints stay on disk.
        max_failed_rounds: how many rounds may miss the quorum, without one between them that changed the rules, before
            the run stops; a round whose clients have nothing to learn from is no such round, and no pause either.
        quarantine_after: a client whose replies were refused this many times in a row is not asked for a while;
            0 never leaves one out.
        quarantine_rounds: for how many rounds; one refusal after that puts it out again.
    """

    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    adapters: Annotated[tuple[Adapter, ...], Field(strict=False)] = ("memory",)
    algorithm: str = Field(default="fedavg", min_length=1)
    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    shared: str | Annotated[tuple[str, ...], Field(strict=False)] = "theta"
    lora_ranks: Annotated[tuple[str, ...], Field(strict=False)] = ()
    clients_per_round: int = Field(default=0, ge=0)
    quorum: int = Field(default=1, ge=1)
    pace: Literal["patient", "minutes", "hours", "days"] = "patient"
    deadline_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    warm_up_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    parallel_clients: int = Field(default=1, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    max_failed_rounds: int = Field(default=3, ge=1)
    quarantine_after: int = Field(default=3, ge=0)
    quarantine_rounds: int = Field(default=10, ge=1)

    def seconds_to_wait(self, first: bool) -> float | None:
        """Gives how long a round waits for replies; None for as long as they take.

        Args:
            first: whether it is the first round of a sitting, in which clients load their models.
        """
        deadline_s, warm_up_s = PACES.get(self.pace, (self.deadline_s, self.warm_up_s))
        return deadline_s + (warm_up_s if first else 0.0) if deadline_s else None

    @field_validator("adapters", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("adapters")
    @classmethod
    def _each_once(cls, value: tuple[Adapter, ...]) -> tuple[Adapter, ...]:
        if len(set(value)) != len(value) or not value:
            raise ValueError("name at least one adapter, each once")
        return value

    @field_validator("shared")
    @classmethod
    def _named(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        entries = (value,) if isinstance(value, str) else value
        if not all(entries) or not entries:
            raise ValueError('name a preset ("memory", "theta", "lora", "all"), or list groups or patterns')
        check_words(entries)
        return value

    @field_validator("lora_ranks")
    @classmethod
    def _ranked(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            pattern, _, rank = entry.rpartition("=")
            if not pattern or not rank.isascii() or not rank.isdigit() or int(rank) < 1:
                raise ValueError('write "PATTERN=RANK" with a rank of at least 1, for example "passkey=4"')
        return value

    @model_validator(mode="after")
    def _one_pace(self) -> Self:
        if self.pace in PACES and (self.deadline_s or self.warm_up_s):
            raise ValueError(
                f'pace = "{self.pace}" sets how long a round waits, and so would deadline-s or warm-up-s: '
                'leave both out, or set pace = "patient"'
            )
        return self

    @model_validator(mode="after")
    def _quorum_can_be_met(self) -> Self:
        if 0 < self.clients_per_round < self.quorum:
            raise ValueError(
                f"quorum = {self.quorum}, but clients-per-round = {self.clients_per_round}: lower the quorum"
            )
        return self
