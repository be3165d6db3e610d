"""A trained run as a model of the LM evaluation harness. Importing this imports the harness."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lm_eval.models.huggingface import HFLM

from fednl.errors import SettingsError
from fednl.loading import load
from fednl.memory import closed

_PASSED_ON = (
    "add_bos_token",
    "batch_size",
    "chat_template_args",
    "enable_thinking",
    "logits_cache",
    "max_batch_size",
    "max_length",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "truncation",
)


class FednlLM(HFLM):  # type: ignore[misc]  # the harness is taken as Any
    """The backbone of a run with its trained rules, asked by the harness as it asks `hf`.

    Every request starts from a fresh memory. With `memory="closed"` the logits are those of the backbone within the
    run's attention window, and those of the bare backbone where `memory.window-tokens` is 0.

    Args:
        run: a run's folder, or a folder of rules.
        memory: `"open"`, or `"closed"` to multiply every gate by 0.
        device: where the model goes; None is where the run's settings put it.
        client: whose rules of the run, as for `fednl.load`; empty for the shared ones.
        more: what `hf` too knows about asking: `batch_size`, `max_length` and the like. The precision and the backbone
            are the run's own.

    Raises:
        SettingsError: there is no such folder, `memory` is neither word, or an argument is not known here.
        FednlError: the backbone or the rules cannot be loaded.

    Source: arguments and request handling of lm-evaluation-harness 0.4.13.
    """

    def __init__(
        self, run: str = "", memory: str = "open", device: str | None = None, client: str = "", **more: Any
    ) -> None:
        if not run:
            raise SettingsError("the model fednl needs a run: give --model_args run=RUN.")
        if memory not in ("open", "closed"):
            raise SettingsError(f'--model_args memory={memory}: it must be "open" or "closed".')
        if unknown := sorted(set(more) - set(_PASSED_ON)):
            raise SettingsError(
                f"--model_args {unknown[0]} is not known to the model fednl; it takes run, memory, device, client, "
                f"{', '.join(_PASSED_ON)}."
            )
        model, tokenizer = load(Path(run), client=client)
        if device:
            model.to(device)
        self._within = ExitStack()
        if memory == "closed":
            self._within.enter_context(closed(model))
        super().__init__(pretrained=model, tokenizer=tokenizer, **more)
