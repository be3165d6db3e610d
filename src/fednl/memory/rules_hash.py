"""A checksum of all that was learned on a model, by which a conversation's memory knows its rules again."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from fednl.memory.attach import rules
from fednl.memory.sites import BESIDE, Attachment


def rules_hash(owner: Attachment) -> str:
    """SHA-256 over names and exact values of all that was learned on a model, and over what these do in it.

    The rules of its memory; factors of a LoRA if it has one, with its scale, what of it is at work and what is merged
    into the weights; context vectors and coefficients if there are any, with where they are injected.
    """
    found = {name: p for name, p in owner.decoder.named_parameters() if "lora_" in name} | rules(owner.decoder)
    digest = hashlib.sha256()
    for name, module in owner.decoder.named_modules():
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, dict) and hasattr(module, "lora_A"):  # PEFT's own layer; an attention's is a number
            lora: Any = module
            work = [sorted(scaling.items()), lora.active_adapters, lora.disable_adapters, lora.merged_adapters]
            digest.update(f"{name} {json.dumps(work)}\n".encode())
    beside = owner.decoder.__dict__.get(BESIDE)
    if beside is not None:
        digest.update(f"{beside.how}\n".encode())
        found |= beside.tensors
    for name, parameter in sorted(found.items()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
