"""What the rules of a memory begin with: fresh ones, the public ones shipped here, or a folder's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fednl.data.examples import encode_texts
from fednl.data.fillers import generated_text
from fednl.errors import CheckpointError, FednlError
from fednl.memory import MemoryConfig
from fednl.memory.centre import centre
from fednl.memory.families import last_position
from fednl.memory.reduced import factored, unread
from fednl.memory.rules_file import assign, check_backbone, check_settings, memory_settings, read_rules
from fednl.memory.sites import attachment
from fednl.models.backbone import Backbone
from fednl.seeding import python_rng

PUBLIC = Path(__file__).parent / "public"
CENTRE_SEED, CENTRE_SENTENCES = 0, 120


def load_start(backbone: Backbone, live: Mapping[str, Tensor], memory: MemoryConfig) -> None:
    """Gives a mounted memory the rules that `memory.start` names; fresh ones are centred on generated text.

    Where `memory.write-rank` is set and the rules named have full matrices, it starts from the nearest of that rank;
    where `memory.gate` is not `"input"` and theirs read the input, from their gates' biases.

    Args:
        backbone: with the memory attached to its model.
        live: the model's rules by canonical name; changed in place.
        memory: its settings.

    Raises:
        CheckpointError: there are no such rules, or they are damaged, or of another backbone or other settings.
    """
    model = backbone.model
    if memory.start == "fresh":
        if memory.rank or memory.keys == "context":
            text = generated_text(python_rng(CENTRE_SEED, "centre"), CENTRE_SENTENCES)
            # No more than the backbone has position embeddings for, where positions are learned.
            ids = torch.tensor(encode_texts(backbone.tokenizer, [text]))[:, : last_position(attachment(model).decoder)]
            centre(model, ids.to(model.device))
        return
    folder = PUBLIC / backbone.identity["name"] if memory.start == "public" else Path(memory.start)
    if memory.start == "public" and not folder.is_dir():
        raise CheckpointError(
            f'memory.start = "public": none are shipped for backbone {backbone.identity["name"]!r}; '
            'set it to "fresh" or to a folder of saved rules.'
        )
    try:
        tensors, description = read_rules(folder)
        check_backbone(model, description, folder)
        saved = memory_settings(description, folder)
        if memory.write_rank and not saved.write_rank:
            tensors = factored(tensors, memory.write_rank)
            saved = saved.model_copy(update={"write_rank": memory.write_rank})
        if memory.gate != "input" and saved.gate == "input":
            tensors, saved = unread(tensors, memory.gate), saved.model_copy(update={"gate": memory.gate})
        check_settings(memory, saved, folder, description["backbone"]["layers"])
        assign({name: p for name, p in live.items() if ".memory." in name}, tensors, str(folder))
    except FednlError as error:
        raise type(error)(f'memory.start = "{memory.start}": {error}') from None
