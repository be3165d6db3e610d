"""What the clients hold under some settings: the one place where settings and a tokenizer become examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fednl.config import Config
from fednl.data import Splits, Tokenizer, stream_task, task
from fednl.data.tasks import TELLS


def held(config: Config, tokenizer: Tokenizer, note: Callable[[str], None] | None = None) -> dict[str, Splits[Any]]:
    """Makes every client's examples.

    Args:
        config: the settings.
        tokenizer: the backbone's.
        note: is told in one line what of a source is left out.

    Raises:
        FednlError: the data cannot be made as set.
    """
    made_from = (
        config.data,
        tokenizer,
        config.memory.window_tokens,
        config.evaluation.answer,
        config.run.seed,
        *([config.task_settings] if config.task_settings else []),
    )
    if config.tasks.order:
        return stream_task(config.data.task)(*made_from, config.tasks)
    told = {"note": note} if note and config.data.task in TELLS else {}
    return task(config.data.task)(*made_from, **told)


def met_before(own: Mapping[str, Splits[Any]], now: Mapping[str, Splits[Any]]) -> dict[str, int]:
    """Counts, by client, the test questions that a run was trained or validated on, whoever of its clients held them.

    Args:
        own: what the run's clients hold under its own settings.
        now: what is asked, under others. Items are told apart by `origin`, not by the tokens that are left of them.
    """
    known = {
        one.origin for splits in own.values() for one in (*splits.train, *splits.validation) if hasattr(one, "origin")
    }
    return {client: sum(getattr(one, "origin", None) in known for one in splits.test) for client, splits in now.items()}
