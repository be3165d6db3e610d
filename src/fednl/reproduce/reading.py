"""Held-out texts, and a trained run that reads them token by token, the memory open or closed. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fednl.data.text import client_sources, unseen_sources
from fednl.errors import DataError
from fednl.reproduce import settings
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Method
from fednl.runs import Run

FEDNL = Method("fednl", settings.FEDNL)
OPEN, CLOSED = "federated", "window-only"
FINE_TOKENS = 64
"""Every text is read once, in fine bins."""
_PIECE_TOKENS = 256


class Reader:
    """A trained run that reads; nothing is loaded before the first text that is not read yet."""

    def __init__(self, sitting: Sitting, run: Run, tokens: int, texts: int) -> None:
        self._sitting, self._run, self._tokens, self._count = sitting, run, tokens, texts
        self._loaded: tuple[Any, list[tuple[int, ...]]] | None = None

    def named(self) -> dict[int, str]:
        """The number of each text -> the first 32 hexadecimal digits of its tokens' SHA-256."""
        _, texts = self._ready()
        return {place: hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:32] for place, ids in enumerate(texts)}

    def read(self, arm: str, text: int) -> Mapping[str, Any]:
        """How one text is read in one arm."""
        from contextlib import nullcontext

        from fednl.evaluation.streaming import stream_nats
        from fednl.memory import MemoryCache, closed

        model, texts = self._ready()
        done, total = (2 * text + (arm == CLOSED)) * self._tokens, 2 * self._count * self._tokens
        begins = {"event": "phase", "name": f"reading text {text + 1}", "arm": arm, "done": done, "total": total}
        self._sitting.on_event(begins)

        def tell(read: int) -> None:
            self._sitting.on_event({"event": "step", "arm": arm, "done": done + read, "total": total})

        with closed(model) if arm == CLOSED else nullcontext():
            found = stream_nats(
                model,
                texts[text],
                make_cache=MemoryCache,
                bin_tokens=FINE_TOKENS,
                piece_tokens=_PIECE_TOKENS,
                across_bins=True,
                on_read=tell,
            )
        return vars(found)

    def _ready(self) -> tuple[Any, list[tuple[int, ...]]]:
        if self._loaded is None:
            import torch

            from fednl.models.loading import load

            torch.set_num_threads(1)
            model, tokenizer = load(self._run.path)
            self._loaded = model, held_out_texts(self._sitting, tokenizer, self._count, self._tokens)
        return self._loaded


def held_out_texts(sitting: Sitting, tokenizer: Any, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Texts of held-out clients, as many of each; where none is held out, of what every client keeps for testing.

    Raises:
        DataError: there is not so much text.
    """
    from fednl.data.documents import documents
    from fednl.data.text import TextSettings

    config = sitting.config(FEDNL)
    own = TextSettings.model_validate(config.task_settings)
    unseen = unseen_sources(config.data, own)
    sources = unseen or list(dict.fromkeys(client_sources(config.data, own).values()))
    each, seed = -(-count // len(sources)), config.run.seed
    try:
        found = [documents(source, tokenizer, each, tokens, held_out=source in unseen, seed=seed) for source in sources]
    except DataError as error:  # it names the keys of the tasks
        told = str(error).replace("data.filler", "text.sources").replace("data.tokens", "--lengths")
        raise DataError(f"--lengths {tokens}, {count} texts: {told}") from None
    return [text for texts in zip(*found, strict=True) for text in texts][:count]
