"""Context vectors and coefficients kept by task, so that a known task needs no rounds and a like one starts nearer.

An entry is a folder with `params.safetensors` and `entry.json`. It holds numbers of the federation only: what every
client was sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fednl.errors import CheckpointError
from fednl.files import write_atomic
from fednl.models.context_injection import COEFFICIENTS, VECTORS

Tensors: TypeAlias = Mapping[str, Tensor]

LIKE, TEMPERATURE = 0.8, 0.5
_OF_THE_TASK = ("task", "texts", "data", "template")
_TENSORS, _ENTRY = "params.safetensors", "entry.json"


@dataclass(frozen=True)
class TaskKey:
    """What must be the same for vectors and coefficients to mean the same.

    Attributes:
        task: names the task, with its settings.
        texts: names the texts that its examples are drawn from.
        data: a checksum of who holds which examples, in training and in test. Another seed draws others: what was
            learned on one draw's training texts may be asked in another's test.
        backbone: the model with its revision or checksum, for example a backbone's `identity`, as JSON.
        tokenizer: a checksum of the tokenizer.
        template: the prompt's template with the labels' words.
        layers: how many layers are injected.
        dtype: the backbone's precision.
        position: which token was read.
        inject: where vectors are injected.
    """

    task: str
    texts: str
    data: str
    backbone: str
    tokenizer: str
    template: str
    layers: int
    dtype: str
    position: str
    inject: str = "all"

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, hexadecimal."""
        return _digest(asdict(self))

    @property
    def model_digest(self) -> str:
        """The same of the model alone: entries that agree in it, on other texts, can start one another."""
        return _digest({name: value for name, value in asdict(self).items() if name not in _OF_THE_TASK})


@dataclass(frozen=True)
class Like:
    """What the store knows of tasks like a new one.

    Attributes:
        params: `context.coefficients` and `context.vectors` to start from; None where no task is like it.
        count: how many tasks they are the mean of.
        cosines: of every task on the same model with the new one, the nearest first.
    """

    params: dict[str, Tensor] | None
    count: int
    cosines: tuple[float, ...]

    def sentence(self) -> str:
        """Says it for the display."""
        if not self.cosines:
            return "the store has no other task on this model: the run goes on from its own coefficients"
        if self.params is None:
            return (
                f"none of {len(self.cosines)} stored tasks on this model is like this one (the nearest has cosine "
                f"{self.cosines[0]:.2f}, and more than {LIKE} counts): the run goes on from its own coefficients"
            )
        told = ", ".join(f"{cosine:.3f}" for cosine in self.cosines[: self.count])
        return (
            f"{self.count} of {len(self.cosines)} stored tasks on this model are like this one (cosine {told}): the "
            "coefficients go on from theirs"
        )


class ContextStore:
    """A folder of entries.

    Args:
        folder: where; made when something is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: TaskKey, params: Mapping[str, Tensor]) -> Path:
        """Keeps a task's vectors and coefficients; an older entry of the same key is replaced.

        Args:
            key: what they belong to.
            params: `context.coefficients` and `context.vectors`; other names are left out.

        Returns:
            The entry's folder.
        """
        place = self.folder / key.digest[:32]
        place.mkdir(parents=True, exist_ok=True)
        content = save({name: params[name].detach().cpu().contiguous() for name in (COEFFICIENTS, VECTORS)})
        write_atomic(place / _TENSORS, content)
        entry = {"format": 1, "key": asdict(key), "model": key.model_digest, "sha256": _sha256(content)}
        write_atomic(place / _ENTRY, json.dumps(entry, indent=1).encode("utf-8"))
        return place

    def get(self, key: TaskKey) -> dict[str, Tensor] | None:
        """Gives what was kept for exactly this key, the same bytes; None if nothing was.

        Raises:
            CheckpointError: the entry is damaged.
        """
        place = self.folder / key.digest[:32]
        return _read(place)[1] if (place / _ENTRY).exists() else None

    def near(self, key: TaskKey, coefficients: Tensor) -> Like:
        """Gives a start for a new task from like ones on the same model.

        Tasks count whose coefficients have a cosine above 0.8 with the new task's; their vectors and coefficients are
        averaged with weights of a softmax over these cosines, at temperature 0.5.

        Args:
            key: the new task's; entries on the same texts are left out, for what they learned may be its test
                questions, and so are those that do not say their texts, and every entry of another model, tokenizer,
                number of layers, precision or position.
            coefficients: the new task's after a few steps, `[layers, 2, 2]`.

        Raises:
            CheckpointError: an entry is damaged, or holds tensors of other shapes than the new task's model has.

        Source: I2CL (arXiv 2405.14660), transfer between tasks by the similarity of calibrated coefficients.
        """
        compared: list[tuple[float, dict[str, Tensor]]] = []
        for place in sorted(self.folder.glob(f"*/{_ENTRY}")):
            entry, params = _read(place.parent)
            if entry["model"] != key.model_digest or entry["key"].get("texts", key.texts) == key.texts:
                continue
            _check_shapes(place.parent, params, coefficients, compared[0][1] if compared else params)
            pair = (params[COEFFICIENTS].flatten().double(), coefficients.detach().cpu().flatten().double())
            compared.append((float(torch.nn.functional.cosine_similarity(*pair, dim=0)), params))
        compared.sort(key=lambda one: -one[0])
        cosines = tuple(cosine for cosine, _ in compared)
        like = [(cosine, params) for cosine, params in compared if cosine > LIKE]
        if not like:
            return Like(None, 0, cosines)
        weights = torch.softmax(torch.tensor([cosine for cosine, _ in like], dtype=torch.float64) / TEMPERATURE, 0)
        start = {
            name: sum(w * params[name].double() for w, (_, params) in zip(weights, like, strict=True)).to(
                like[0][1][name].dtype
            )
            for name in (COEFFICIENTS, VECTORS)
        }
        return Like(start, len(like), cosines)


def _check_shapes(place: Path, params: Tensors, wanted: Tensor, other: Tensors) -> None:
    """Refuses an entry that says it is of this model and is not."""
    found, vectors = params[COEFFICIENTS].shape, params[VECTORS].shape
    if found != wanted.shape or vectors != other[VECTORS].shape or vectors[:2] != found[:2]:
        raise CheckpointError(
            f"the entry {place} has coefficients {list(found)} and vectors {list(vectors)}, which do not fit this "
            f"model's {list(wanted.shape)}: delete that folder."
        )


def _read(place: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        entry: dict[str, Any] = json.loads((place / _ENTRY).read_text(encoding="utf-8"))
        whole = _sha256((place / _TENSORS).read_bytes()) == entry["sha256"]
        tensors = load_file(place / _TENSORS)
        if whole and entry["format"] == 1 and {COEFFICIENTS, VECTORS} == tensors.keys():
            return entry, tensors
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        pass
    raise CheckpointError(f"the entry {place} is damaged: delete that folder, and the task is learned again.")


def _digest(fields: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(fields, sort_keys=True).encode("utf-8"))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
