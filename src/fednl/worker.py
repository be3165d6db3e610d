"""A client's operations as jobs: JSON headers and serialised tensors in and out, in this process or in a worker's."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fednl.client import Bench
from fednl.config import Config
from fednl.data import load_filler, partition_rows
from fednl.data.partition import question_digest
from fednl.errors import NonFiniteError
from fednl.evaluation.measures import MEASURES
from fednl.federation.frames import Blobs, Handler, OnProgress, serve
from fednl.federation.transport import call_endpoint
from fednl.federation.wire import pack, unpack
from fednl.holdings import held, met_before
from fednl.runs import Run


def handlers(config: Config) -> dict[str, Handler]:
    """The operations of a worker, by name; each takes and gives JSON headers and serialised tensors.

    The bench is set up by the first job, so that what is wrong with a setting reaches whoever asked.
    """
    benches: list[Bench] = []

    def bench(note: Callable[[str], None] | None = None) -> Bench:
        if not benches:
            benches.append(Bench(config, note))
        return benches[0]

    def describe(job: dict[str, Any], blobs: list[bytes], tell: OnProgress) -> tuple[dict[str, Any], Blobs]:
        own = bench(lambda text: tell({"note": text}))
        facts: dict[str, Any] = {
            "identity": own.backbone.identity,
            "backbone": own.identity,
            "dtype": str(own.model.dtype).removeprefix("torch."),
            "partition": [vars(row) for row in partition_rows(own.data)],
            "kinds": Counter(one.task for splits in own.data.values() for one in splits.train if one.task),
            "candidates": own.candidates,
            "questions": {client: [question_digest(one) for one in splits.test] for client, splits in own.data.items()},
        }
        if config.tasks.order:
            counts = {client: Counter(one.task for one in splits.train) for client, splits in own.data.items()}
            facts["tasks"] = {task: {client: counts[client][task] for client in counts} for task in config.tasks.order}
        if own.backbone.context_tokens:
            facts["context_tokens"] = own.backbone.context_tokens
        if config.context_vectors.store != "off":
            facts["context_key"] = vars(own.task_key())
        if config.data.task == "needles":  # the only task so far that reads `data.filler`
            facts["filler_sha256"] = load_filler(config.data.filler).sha256
        return facts, ()

    def met(job: dict[str, Any], blobs: list[bytes], tell: OnProgress) -> tuple[dict[str, Any], Blobs]:
        trained = held(Config.from_dict(job["config"]), bench().backbone.tokenizer)
        rows = [vars(row) for row in partition_rows(trained)]
        return {"partition": rows, "met": met_before(trained, bench().data)}, ()

    def start(job: dict[str, Any], blobs: list[bytes], tell: OnProgress) -> tuple[dict[str, Any], Blobs]:
        return {}, (pack(bench().start(job["setup"])),)

    def train(job: dict[str, Any], blobs: list[bytes], tell: OnProgress) -> tuple[dict[str, Any], Blobs]:
        payload, state = blobs
        endpoint = bench().endpoint(job["arm"])
        return {}, call_endpoint(endpoint, job["client"], payload, state, lambda _, facts: tell(facts))

    def score(job: dict[str, Any], blobs: list[bytes], tell: OnProgress) -> tuple[dict[str, Any], Blobs]:
        outcomes = bench().score(job["arm"], job["client"], unpack(blobs[0])[0], tell, job.get("tasks"))
        return {"outcomes": [vars(outcome) for outcome in outcomes]}, ()

    def validate(job: dict[str, Any], blobs: list[bytes], tell: OnProgress) -> tuple[dict[str, Any], Blobs]:
        params = unpack(blobs[0])[0]
        if MEASURES[config.data.task].validates_answers:
            try:
                outcomes = bench().answered(job["arm"], job["client"], params)
            except NonFiniteError:  # the rules come to NaN, which is no loss to be the lowest
                return {"loss": math.nan, "tokens": 0}, ()
            tokens = sum(one.gold_tokens for one in outcomes)
            loss = sum(one.nats_per_token * one.gold_tokens for one in outcomes) / max(1, tokens)
            return {"loss": loss, "tokens": tokens, "correct": [one.correct for one in outcomes]}, ()
        loss, tokens = bench().validate(job["arm"], job["client"], params)
        return {"loss": loss, "tokens": tokens}, ()

    return {"describe": describe, "met": met, "start": start, "train": train, "score": score, "validate": validate}


def main() -> None:
    """A worker process: `python -m fednl.worker CONFIG.json`; answers jobs on its standard input."""
    path = Path(sys.argv[1])
    serve(handlers(Config.from_dict(Run(path.parent).read_json(path.name), str(path))))


if __name__ == "__main__":
    main()
