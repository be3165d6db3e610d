"""Settings of the tables on ordinary text, by scale, `"section.key=value"` each. Imports no torch."""

from __future__ import annotations

_TASK = ("data.task=text", 'evaluation.arms=["window-only", "federated"]')
NEWS = ("business", "entertainment", "sports", "politics", "tech")
"""The classes of the packaged news; in every scale the last two are held out."""
NEWS_SETS = (
    *_TASK,
    "text.sources=[" + ", ".join(f'"bbc-news/{name}"' for name in NEWS) + "]",
    "data.clients=5",
    'data.hold-out-clients=["politics", "tech"]',
    "data.validation=0",
)
TINY_SETS = (
    *_TASK,
    'text.sources=["generated"]',
    "data.clients=1",
    "data.tokens=40",
    "data.train=4",
    "data.validation=0",
    "data.test=2",
    'memory.layers="last:1"',
    "memory.rank=2",
    "memory.window-tokens=16",
    "training.rounds=1",
    "training.local-steps=1",
    "training.batch=2",
)
SMALL_SETS = (
    *NEWS_SETS,
    "backbone.id=smollm2-135m",
    "backbone.dtype=auto",
    "data.tokens=256",
    "data.train=400",
    "data.test=6",
    'memory.layers="8,9,14-23"',
    "memory.rank=8",
    "memory.window-tokens=64",
    "memory.start=fresh",
    "training.local-steps=6",
    "training.rounds=2",
    "training.batch=1",
    "training.local-lr=1e-2",
    "evaluation.batch=1",
)
PAPER_SETS = (
    *NEWS_SETS,
    "backbone.id=meta-llama/Llama-3.2-1B",
    "backbone.dtype=bfloat16",
    "data.tokens=4096",
    "data.train=750",
    "data.test=15",
    'memory.layers="last:8"',
    "memory.rank=8",
    "memory.window-tokens=256",
    "memory.start=fresh",
    "training.rounds=2",
    "training.local-steps=188",
    "training.batch=4",
    "training.local-lr=3e-3",
    "evaluation.batch=1",
)
