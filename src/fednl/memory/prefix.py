"""The frozen prefix: what the layers below the first memory compute for an example is computed once.

These layers never change while rules train, so neither does what they make of an example. A pass begins at the first
trained layer, with what is kept of its examples; what is not kept is computed of each example alone, and goes on as it
would be kept. So no result depends on room, nor on who computed what before. Addresses are made of an early layer's
inputs, so these are kept too.

What is kept is private text in another form. It stays in this process, or in a folder for its owner only that goes with
it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fednl.errors import SettingsError
from fednl.memory.families import family_of
from fednl.memory.layer_hooks import CONTEXT
from fednl.memory.settings import PrefixSettings
from fednl.memory.sites import Attachment, GivenPrefix, attachment

MEGABYTE = 10**6


def first_trained_layer(owner: Attachment) -> int:
    """The first block that holds a memory or anything that trains; the addresses do not count."""
    apart = set() if owner.addresses is None else {id(p) for p in owner.addresses.parameters()}
    blocks = getattr(owner.decoder, family_of(owner.decoder).blocks)
    for index, block in enumerate(blocks):
        if index in owner.layers or any(p.requires_grad and id(p) not in apart for p in block.parameters()):
            return index
    return len(blocks)


@dataclass(eq=False)
class Kept:
    """Activations by example, in memory or on disk, up to a limit; the first ones stay.

    A disk that refuses costs time and nothing else: what is there stays, and no more is kept.

    Attributes:
        limit_bytes: no more than this is kept.
        folder: where, or `None` for memory; it is taken away when this object goes, at the latest with the process.
        held_bytes: how much is.
    """

    limit_bytes: int
    folder: Path | None = None
    held_bytes: int = 0

    def __post_init__(self) -> None:
        self._tensors: dict[str, dict[str, Tensor] | int] = {}  # or how many bytes a file has of them
        if self.folder is not None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def get(self, key: str) -> dict[str, Tensor] | None:
        """What was kept of an example; None where nothing was, or its file is gone or damaged."""
        held = self._tensors.get(key)
        if not isinstance(held, int):
            return held
        try:
            return load_file(self._file(key))
        except (OSError, SafetensorError):
            self._remove(key)
            del self._tensors[key]
            self.held_bytes -= held
            return None

    def keep(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keeps an example's activations if there is room."""
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if key in self._tensors or self.held_bytes + size > self.limit_bytes:
            return
        if self.folder is not None:
            try:
                save_file(tensors, self._file(key))
            except (OSError, SafetensorError):
                self._remove(key)
                self.limit_bytes = self.held_bytes
                return
        self._tensors[key] = tensors if self.folder is None else size
        self.held_bytes += size

    def _remove(self, key: str) -> None:
        with suppress(OSError):
            self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"


def _on_disk(settings: PrefixSettings) -> Kept:
    """A new folder that only its owner can read; where there is no place for one, nothing is kept."""
    try:
        return Kept(settings.limit_mb * MEGABYTE, Path(tempfile.mkdtemp(prefix="fednl-prefix-")))
    except OSError:
        return Kept(0)


class PrefixCache:
    """Lets passes begin at the first trained layer.

    Args:
        model: with everything attached that is to train.
        settings: the `[prefix]` section.
        kept: activations of the same frozen layers from before, or `None` to begin with none.

    Attributes:
        layer: where such passes begin.
        computed, taken: how many examples went through the layers below, and how many did not have to.

    Raises:
        BackboneError: no memory is attached.
        SettingsError: nothing frozen lies below the first memory, or `cache` is `"off"`.
    """

    def __init__(self, model: nn.Module, settings: PrefixSettings, kept: Kept | None = None) -> None:
        self._owner = attachment(model)
        self.layer = first_trained_layer(self._owner)
        if settings.cache == "off" or self.layer == 0:
            raise SettingsError(
                f'prefix.cache = "{settings.cache}", memory.layers = "{self._owner.config.layers}": where layer 0 '
                'trains there is nothing to cache; put memory into upper layers only, or set prefix.cache = "off".'
            )
        self._narrow = settings.dtype == "bfloat16"
        if kept is None:
            kept = _on_disk(settings) if settings.cache == "disk" else Kept(settings.limit_mb * MEGABYTE)
        self.kept = kept
        self.computed = self.taken = 0

    @contextmanager
    def over(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block, passes over `batch` without a cache begin at the first trained layer.

        The model must not run in another thread meanwhile.

        Args:
            batch: `input_ids` and `attention_mask`, `[batch, tokens]`.
        """
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        found = [self._of(row[there]) for row, there in zip(ids, real, strict=True)]
        with self._begun(found, real):
            yield

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
    def _begun(self, found: list[dict[str, Tensor]], real: Tensor) -> Iterator[None]:
        """Puts examples' activations in the place of the blocks below."""
        decoder, name = self._owner.decoder, family_of(self._owner.decoder).blocks
        blocks: Any = getattr(decoder, name)
        like = next(blocks[self.layer].parameters())
        filled = {part: _padded([one[part] for one in found], real, like) for part in found[0]}
        last = self.layer - 1
        below = [_Passed(block) for block in blocks[:last]] + [_Passed(blocks[last], filled["hidden"])]
        setattr(decoder, name, nn.ModuleList([*below, *blocks[self.layer :]]))
        self._owner.given = GivenPrefix(filled.get("source"))
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


def _key(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().contiguous().numpy().tobytes()).hexdigest()


def _padded(rows: list[Tensor], real: Tensor, like: Tensor) -> Tensor:
    """Rows of real tokens as a batch in the backbone's dtype and place, zeros for padding."""
    out = torch.zeros(*real.shape, rows[0].shape[-1], dtype=like.dtype, device=like.device)
    return out.masked_scatter(real.to(like.device).unsqueeze(-1), torch.cat(rows).to(like))
