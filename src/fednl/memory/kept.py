"""Where activations of the frozen prefix are kept by example, and what tells whose they are.

What is kept is private text in another form. It stays in this process, or in a folder for its owner only that goes with
it.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fednl.memory.settings import PrefixSettings

MEGABYTE = 10**6


@dataclass(frozen=True, eq=False)
class Origin:
    """What made activations: the same layers in the same state make the same.

    Attributes:
        layer, narrow: where passes begin, and whether activations are rounded to bfloat16.
        tensors: address and version of every parameter below; a change in place counts the version up.
        probe: what they make of a few tokens, for what leaves no trace there (a merged LoRA, a hook, another adapter).
    """

    layer: int
    narrow: bool
    tensors: tuple[tuple[int, int], ...]
    probe: dict[str, Tensor]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Origin)
            and (self.layer, self.narrow, self.tensors) == (other.layer, other.narrow, other.tensors)
            and self.probe.keys() == other.probe.keys()
            and all(_equal(x, other.probe[name]) for name, x in self.probe.items())
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False)
class Kept:
    """Activations by example, in memory or on disk, up to a limit; the first ones stay.

    A disk that refuses costs time and nothing else: what is there stays, and no more is kept.

    Attributes:
        limit_bytes: no more than this is kept.
        folder: where, or `None` for memory; it is taken away when this object goes, at the latest with the process.
        held_bytes: how much is.
        origin: what made it; `None` before the first.
    """

    limit_bytes: int
    folder: Path | None = None
    held_bytes: int = 0
    origin: Origin | None = None

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

    def come_from(self, origin: Origin) -> None:
        """Forgets everything that another origin made."""
        if origin == self.origin:
            return
        if self.folder is not None:
            for key in self._tensors:
                self._remove(key)
        self._tensors, self.held_bytes, self.origin = {}, 0, origin

    def _remove(self, key: str) -> None:
        with suppress(OSError):
            self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"


def on_disk(settings: PrefixSettings) -> Kept:
    """A new folder that only its owner can read; where there is no place for one, nothing is kept."""
    try:
        return Kept(settings.limit_mb * MEGABYTE, Path(tempfile.mkdtemp(prefix="fednl-prefix-")))
    except OSError:
        return Kept(0)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
