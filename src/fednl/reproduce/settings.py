"""Settings that several tables share, `"section.key=value"` each. Imports no torch."""

from __future__ import annotations

TINY = (
    "memory.rank=2",
    'memory.layers="last:1"',
    "memory.window-tokens=130",
    "training.rounds=1",
    "training.local-steps=1",
    "training.batch=2",
    "data.clients=2",
    "data.validation=0",
)
"""A random model of two layers over bytes; one step a client."""

TINY_NEEDLES = (*TINY, "data.tokens=430", "data.events=2", "data.questions=1", "data.train=4", "data.test=2")

SMOLLM2 = (
    "backbone.id=smollm2-135m",
    "backbone.dtype=auto",
    'memory.layers="14-23"',
    "memory.rank=8",
    "memory.start=public",
    "training.batch=2",
    "federation.parallel-clients=2",
)
"""The small scale's model with the public rules, in two worker processes."""

LLAMA_1B = (
    "backbone.id=meta-llama/Llama-3.2-1B",
    "backbone.dtype=bfloat16",
    'memory.layers="last:8"',
    "memory.rank=8",
    "memory.window-tokens=256",
    "training.batch=4",
)
"""The paper scale's model, with fresh rules in its upper half; layers and window are ours."""

FEDNL = ("federation.algorithm=fedavg", "lora.rank=0")
"""Memory and nothing beside it, averaged."""

LORA = ("memory.layers=none", "memory.start=fresh", "federation.shared=lora")
"""A LoRA in the place of memory; attention sees as far as the scale's window."""

FEDAVG_LORA = (*LORA, "federation.algorithm=fedavg")

LORA_SIZE = ("lora.rank=8", 'lora.targets="q_proj,v_proj"')
"""How large a LoRA usually is."""

FULL = "memory.window-tokens=0"
"""Attention sees everything, and its cache grows."""

FEDALA_PASSES = ("fedala.steps=2", "fedala.most-passes=3")
"""Few passes over its mixing weights, so that it does not take many times the work of the others."""


def paper_lora(rank: int, rate: str) -> tuple[str, ...]:
    """The paper's LoRA, on all seven linears as its byte counts imply.

    Args:
        rank: its rank; alpha is twice that.
        rate: its learning rate.

    Source: arXiv 2605.16350, appendix C.1.
    """
    return (f"lora.rank={rank}", f"lora.alpha={2 * rank}", "lora.targets=all-linear", f"training.local-lr={rate}")
