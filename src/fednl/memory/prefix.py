"""The frozen prefix: what the layers below the first memory compute for an example is computed once.

These layers never change while rules train, so neither does what they make of an example. A pass begins at the first
trained layer, with what is kept of its examples; what is not kept is computed of each example alone, and goes on as it
would be kept. So no result depends on room, nor on who computed what before. Addresses are made of an early layer's
inputs, so these are kept too.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError, SettingsError
from fednl.memory.families import family_of
from fednl.memory.kept import MEGABYTE, Origin, on_disk
from fednl.memory.kept import Kept as Kept
from fednl.memory.layer_hooks import CONTEXT
from fednl.memory.settings import PrefixSettings
from fednl.memory.sites import Attachment, GivenPrefix, attachment

PROBE_TOKENS = 4
"""Of the pass that tells whether the layers below are what they were."""


def first_trained_layer(owner: Attachment) -> int:
    """The first block that holds a memory or anything that trains; the addresses do not count."""
    apart = set() if owner.addresses is None else {id(p) for p in owner.addresses.parameters()}
    blocks = getattr(owner.decoder, family_of(owner.decoder).blocks)
    for index, block in enumerate(blocks):
        if index in owner.layers or any(p.requires_grad and id(p) not in apart for p in block.parameters()):
            return index
    return len(blocks)


def frozen_tensors(owner: Attachment, layer: int) -> list[Tensor]:
    """Every parameter below a block, those of the embeddings too; the addresses do not count."""
    apart = set() if owner.addresses is None else {id(p) for p in owner.addresses.parameters()}
    decoder, name = owner.decoder, family_of(owner.decoder).blocks
    before = itertools.takewhile(lambda child: child[0] != name, decoder.named_children())
    parts = [*(module for _, module in before), *getattr(decoder, name)[:layer]]
    return [p for part in parts for p in part.parameters() if id(p) not in apart]


class PrefixCache:
    """Lets passes begin at the first trained layer.

    Args:
        model: with everything attached that is to train.
        settings: the `[prefix]` section.
        kept: activations from before, or `None` to begin with none; those that other layers made, or the same before
            they changed, are forgotten.

    Attributes:
        layer: where such passes begin.
        computed, taken: how many examples went through the layers below, and how many did not have to.

    Raises:
        BackboneError: no memory is attached.
        SettingsError: nothing frozen lies below the first memory, the embedding trains, or `cache` is `"off"`.
    """

    def __init__(self, model: nn.Module, settings: PrefixSettings, kept: Kept | None = None) -> None:
        self._owner = attachment(model)
        self.layer = first_trained_layer(self._owner)
        trains = self.layer == 0 or any(x.requires_grad for x in frozen_tensors(self._owner, self.layer))
        if settings.cache == "off" or trains:
            what = "the embedding" if self.layer else "layer 0"
            raise SettingsError(
                f'prefix.cache = "{settings.cache}", memory.layers = "{self._owner.config.layers}": where {what} '
                'trains there is nothing to cache; put memory into upper layers only, or set prefix.cache = "off".'
            )
        self._narrow = settings.dtype == "bfloat16"
        if kept is None:
            kept = on_disk(settings) if settings.cache == "disk" else Kept(settings.limit_mb * MEGABYTE)
        self.kept = kept
        self.computed = self.taken = 0

    @contextmanager
    def over(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block, passes over `batch` without a cache begin at the first trained layer.

        The model must not run in another thread meanwhile. Where a layer below has changed since, what was kept is
        computed anew: every block begins with a pass over a few tokens through these layers, which tells.

        Args:
            batch: `input_ids` and `attention_mask`, `[batch, tokens]`; padding at the ends of rows. Passes over
                anything else are refused.

        Raises:
            BackboneError: something below trains by now, or draws random numbers, as dropout does in training mode.
        """
        self.kept.come_from(self._origin())
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        found = [self._of(row[there]) for row, there in zip(ids, real, strict=True)]
        with self._begun(found, ids, real):
            yield

    def _origin(self) -> Origin:
        """The layers below as they are now."""
        decoder: Any = self._owner.decoder
        tensors = frozen_tensors(self._owner, self.layer)
        if any(tensor.requires_grad for tensor in tensors):
            raise BackboneError(
                f"Something below layer {self.layer} trains by now, and a pass that begins there would not teach it; "
                "make a new PrefixCache, or train without one."
            )
        device = decoder.get_input_embeddings().weight.device
        before = _drawn(device)
        probe = {name: x.clone() for name, x in self._below(torch.arange(PROBE_TOKENS, device=device)).items()}
        if not all(map(torch.equal, before, _drawn(device))):
            raise BackboneError(
                f"The model draws random numbers below layer {self.layer} (dropout in training mode), and what is kept "
                "would repeat one draw for ever; call model.eval() or set that dropout to 0, or leave the prefix "
                "cache out."
            )
        state = tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors)
        return Origin(self.layer, self._narrow, state, probe)

    def _of(self, ids: Tensor) -> dict[str, Tensor]:
        """What is kept of an example, `[tokens, width]` each; where nothing is, what would be."""
        key = _key(ids)
        found = self.kept.get(key)
        if found is not None:
            self.taken += 1
            return found
        self.computed += 1
        made = {name: self._stored(x[0]) for name, x in self._below(ids).items()}
        self.kept.keep(key, made)
        return made

    def _below(self, ids: Tensor) -> dict[str, Tensor]:
        """What enters the first trained layer of an example alone, and what addresses are made of, as a batch."""
        decoder, name = self._owner.decoder, family_of(self._owner.decoder).blocks
        blocks: Any = getattr(decoder, name)
        caught: dict[str, Tensor] = {}
        end = _Passed(blocks[self.layer])
        end.register_forward_pre_hook(_Catch(caught), with_kwargs=True)
        setattr(decoder, name, nn.ModuleList([*blocks[: self.layer], end]))
        try:
            with torch.no_grad():
                decoder(input_ids=ids.unsqueeze(0), use_cache=False)
        finally:
            setattr(decoder, name, blocks)
        return caught

    def _stored(self, x: Tensor) -> Tensor:
        narrow = torch.bfloat16 if self._narrow and x.dtype.itemsize > 2 else x.dtype
        return x.to("cpu", narrow, copy=True).contiguous()

    @contextmanager
    def _begun(self, found: list[dict[str, Tensor]], ids: Tensor, real: Tensor) -> Iterator[None]:
        """Puts examples' activations in the place of the blocks below."""
        decoder, name = self._owner.decoder, family_of(self._owner.decoder).blocks
        blocks: Any = getattr(decoder, name)
        like = next(blocks[self.layer].parameters())
        filled = {part: _padded([one[part] for one in found], real, like) for part in found[0]}
        last = self.layer - 1
        below = [_Passed(block) for block in blocks[:last]] + [_Passed(blocks[last], filled["hidden"])]
        setattr(decoder, name, nn.ModuleList([*below, *blocks[self.layer :]]))
        self._owner.given = GivenPrefix(filled.get("source"), ids, real)
        try:
            yield
        finally:
            setattr(decoder, name, blocks)
            self._owner.given = None


class _Catch:
    """A hook that notes what enters a block, and of what the addresses of its pass are made."""

    def __init__(self, caught: dict[str, Tensor]) -> None:
        self._caught = caught

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._caught["hidden"] = (args[0] if args else kwargs["hidden_states"]).detach()
        source = kwargs[CONTEXT].source
        if source is not None:
            self._caught["source"] = source


class _Passed(nn.Module):
    """Stands in for a block that is not run: gives what it is told to, or what it was given."""

    def __init__(self, block: nn.Module, given: Tensor | None = None) -> None:
        super().__init__()
        self.__dict__["block"], self.given = block, given
        self.training = block.training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Gives the activations."""
        return hidden_states if self.given is None else self.given


def _drawn(device: torch.device) -> list[Tensor]:
    """The states of the random generators that a pass on `device` draws from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        states += module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
    return states


def _key(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().contiguous().numpy().tobytes()).hexdigest()


def _padded(rows: list[Tensor], real: Tensor, like: Tensor) -> Tensor:
    """Rows of real tokens as a batch in the backbone's dtype and place, zeros for padding."""
    out = torch.zeros(*real.shape, rows[0].shape[-1], dtype=like.dtype, device=like.device)
    return out.masked_scatter(real.to(like.device).unsqueeze(-1), torch.cat(rows).to(like))
