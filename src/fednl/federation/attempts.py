"""How often a run went back behind rounds that failed, and what its questions have spent: kept beside the checkpoints.

`attempts.json` is written before a question leaves, so that no checkpoint which is lost or damaged undoes either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fednl.errors import CheckpointError
from fednl.runs import Run

NAME = "attempts.json"


@dataclass(frozen=True)
class Asked:
    """What left the server last.

    Args:
        round: the round that was asked, or is asked next; 0 where nobody noted any.
        begun: the first round of each attempt after attempt 0.
        before: what had been spent before that question, as `Spent.to_dict` gives it; None without noise.
        after: what has been spent with it.
    """

    round: int = 0
    begun: tuple[int, ...] = ()
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None

    @property
    def question(self) -> tuple[int, int]:
        """The attempt and the round; a later question has a larger one."""
        return len(self.begun), self.round

    @classmethod
    def read(cls, run: Run, name: str = NAME) -> Asked:
        """Reads what `write` wrote; a run without the file has noted nothing.

        Args:
            run: the run.
            name: the file inside it.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not (run.path / name).exists():
            return cls()
        facts = run.read_json(name)
        try:
            counts = (dict(facts[part]) if facts[part] is not None else None for part in ("before", "after"))
            return cls(int(facts["round"]), tuple(map(int, facts["begun"])), *counts)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{run.path / name} is damaged: restore it from a copy.") from None

    def write(self, run: Run, name: str = NAME) -> None:
        """Writes this, whole or not at all.

        Args:
            run: the run.
            name: the file inside it.

        Raises:
            FednlError: the disk refused.
        """
        run.write_json(name, asdict(self))


def taken_back(round: int, attempt: int, begun: Sequence[int]) -> bool:
    """Says whether a round of an attempt was taken back, as a later attempt began with it or before it.

    Args:
        round: counted from 1.
        attempt: in which it was done.
        begun: the first round of each attempt after attempt 0.
    """
    return any(round >= first for first in begun[attempt:])
