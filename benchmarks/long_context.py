"""Trained rules on long contexts: streaming cross-entropy, costs apart, and RULER's tasks; one resumable command each.

    python benchmarks/long_context.py streaming RUN --tokens 16384 --count 16
    python benchmarks/long_context.py costs RUN --tokens 1024,4096,16384
    python benchmarks/long_context.py ruler RUN --tokens 1024 --count 10 --tasks niah_single_1,vt

RUN is a run's folder or one of saved rules. Every text, context or question that is done stands on a line of
`RUN/results/` (or of `--out`), and is not done again. `memory` is the model as it was trained, `window-only` the same
with the gate closed, `full-attention` the bare backbone. Prints Markdown, with n and 95% intervals over texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from fednl import MemoryCache, closed, load
from fednl.data.documents import documents
from fednl.data.needles import build
from fednl.data.ruler import RULER_TASKS, build_ruler
from fednl.data.settings import DataSettings
from fednl.evaluation.costs import measure_cost
from fednl.evaluation.ruler import RulerAnswer, answer_ruler, ruler_rows
from fednl.evaluation.streaming import StreamNats, stream_nats, streaming_rows
from fednl.models import BackboneSettings, load_backbone
from fednl.reproduce.keeping import kept

Work = Callable[[str, int], dict[str, Any]]


class Arms:
    """The models that are compared, one in memory at a time."""

    def __init__(self, run: Path, backbone: BackboneSettings) -> None:
        self._run, self._backbone = run, backbone
        self._held: tuple[str, Any, Any] | None = None

    def model(self, arm: str) -> tuple[Any, Any]:
        """A model and its tokenizer."""
        kind = "bare" if arm == "full-attention" else "attached"
        if self._held is None or self._held[0] != kind:
            self._held = None
            if kind == "bare":
                loaded = load_backbone(self._backbone)
                self._held = kind, loaded.model, loaded.tokenizer
            else:
                self._held = kind, *load(self._run, backbone=self._backbone)
        return self._held[1], self._held[2]

    def use(self, arm: str) -> tuple[Any, Any, Callable[[Any], Any], AbstractContextManager[Any]]:
        """Model, tokenizer, what makes its cache, and what it is measured within."""
        model, tokenizer = self.model(arm)
        if arm == "full-attention":
            return model, tokenizer, lambda bare: DynamicCache(config=bare.config), nullcontext()
        return model, tokenizer, MemoryCache, closed(model) if arm == "window-only" else nullcontext()


def streaming(options: argparse.Namespace, arms: Arms) -> str:
    _, tokenizer = arms.model("memory")
    tokens = options.lengths[0]
    if options.texts == "needles":
        data = DataSettings(tokens=tokens, train=0, validation=0, test=-(-options.count // 7), filler=options.filler)
        made = build(data, tokenizer, 0, "candidates", options.seed)
        texts = [one.prompt_ids for splits in made.values() for one in splits.test][: options.count]
    else:
        texts = documents(options.filler, tokenizer, options.count, tokens)

    def read(arm: str, number: int) -> dict[str, Any]:
        model, _, make_cache, within = arms.use(arm)
        with within:
            return vars(stream_nats(model, texts[number], make_cache=make_cache))

    name = f"streams-{options.texts}-{tokens}-{source(options)}-{options.seed}"
    done = found_by(options, name, options.count, read)
    found = {arm: [StreamNats(**{k: tuple(v) for k, v in one.items()}) for one in done[arm]] for arm in options.arms}
    rows = streaming_rows(found, seed=options.seed, pairs=[("memory", "window-only"), ("memory", "full-attention")])
    columns = ["method", "baseline", "metric", "from_token", "value", "low", "high", "n", "state_bytes", "kv_bytes"]
    return table(rows, columns)


def costs(options: argparse.Namespace, arms: Arms) -> str:
    _, tokenizer = arms.model("memory")
    text = documents(options.filler, tokenizer, 1, max(options.lengths))[0]

    def one(arm: str, number: int) -> dict[str, Any]:
        model, _, make_cache, within = arms.use(arm)
        with within:
            return vars(measure_cost(model, text[: options.lengths[number]], make_cache=make_cache))

    name = f"costs-{'-'.join(map(str, options.lengths))}-{source(options)}"
    done = found_by(options, name, len(options.lengths), one)
    return table(
        [{"method": arm, **cost} for arm in options.arms for cost in done[arm]],
        ["method", "context_tokens", "state_bytes", "kv_bytes", "logits_bytes", "weights_bytes", "trained_bytes"]
        + ["peak_bytes", "prefill_tokens_per_s", "decode_s"],
    )


def ruler(options: argparse.Namespace, arms: Arms) -> str:
    _, tokenizer = arms.model("memory")
    tokens = options.lengths[0]
    questions = [
        one
        for task in options.tasks
        for one in build_ruler(task, options.count, tokens, tokenizer, options.seed, options.filler)
    ]

    def answer(arm: str, number: int) -> dict[str, Any]:
        model, tokenizer, make_cache, within = arms.use(arm)
        with within:
            return vars(answer_ruler(model, tokenizer, questions[number : number + 1], make_cache=make_cache)[0])

    name = f"ruler-{tokens}-{source(options)}-{options.seed}-{'-'.join(options.tasks)}"
    done = found_by(options, name, len(questions), answer)
    found = {arm: [RulerAnswer(**one) for one in done[arm]] for arm in options.arms}
    rows = ruler_rows(found, seed=options.seed, tokens=tokens)
    return table(rows, ["method", "client", "metric", "value", "low", "high", "n", "tokens"])


def source(options: argparse.Namespace) -> str:
    """What numbers depend on besides lengths and seed, as a part of a file's name."""
    return "-".join([Path(options.filler).name, Path(options.backbone).name, options.dtype])


def found_by(options: argparse.Namespace, name: str, count: int, work: Work) -> dict[str, list[dict[str, Any]]]:
    """What every arm gave for every item, doing only what is not on a line of the file yet."""
    asked = [(arm, item) for arm in options.arms for item in range(count)]
    path = options.out / f"{name}.jsonl"
    done = kept(path, asked, work, lambda place: print(f"{place} of {len(asked)}", flush=True))
    return {arm: [done[arm, item] for item in range(count)] for arm in options.arms}


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    shown = [[row.get(column, "") for column in columns] for row in rows]
    return "\n".join(
        head + [f"| {' | '.join(f'{v:,.3f}' if type(v) is float else str(v) for v in r)} |" for r in shown]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["streaming", "costs", "ruler"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", default="16384")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--texts", choices=["documents", "needles"], default="documents")
    parser.add_argument("--filler", default="standard-library")
    parser.add_argument("--tasks", default=",".join(RULER_TASKS))
    parser.add_argument("--arms", default="memory,window-only")
    parser.add_argument("--backbone", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.lengths = [int(part) for part in options.tokens.split(",")]
    options.tasks, options.arms = options.tasks.split(","), options.arms.split(",")
    options.out = options.out or options.run / "results"
    torch.set_num_threads(1)
    arms = Arms(options.run, BackboneSettings(id=options.backbone, dtype=options.dtype))
    print({"streaming": streaming, "costs": costs, "ruler": ruler}[options.what](options, arms))


if __name__ == "__main__":
    main()
