"""The store of context vectors: the same bytes for the same key, nothing for any other, a start from like tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fednl.errors import CheckpointError
from fednl.models.context_injection import COEFFICIENTS, VECTORS
from fednl.models.context_store import ContextStore, TaskKey

MODEL = '{"name": "m", "sha256": "1"}'
KEY = TaskKey("news", "bbc", "0a", MODEL, "tok", "Text: {text}", 2, "float32", "separator")


def on(texts: str, **changed: str) -> TaskKey:
    """The key of a task on other texts."""
    return replace(KEY, task=texts, texts=texts, **changed)  # type: ignore[arg-type]


def params(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {COEFFICIENTS: torch.randn(2, 2, 2, generator=draw), VECTORS: torch.randn(2, 2, 5, generator=draw)}


def test_a_hit_gives_the_same_bytes_and_every_part_of_the_key_counts(tmp_path: Path) -> None:
    store = ContextStore(tmp_path / "store")
    assert store.get(KEY) is None
    store.put(KEY, {**params(0), "layers.0.memory.gate.bias": torch.zeros(1)})
    found = store.get(KEY)
    assert found is not None and found.keys() == params(0).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in params(0).items())
    for field in ("task", "texts", "data", "backbone", "tokenizer", "template", "dtype", "position"):
        assert store.get(replace(KEY, **{field: "another"})) is None
    assert store.get(replace(KEY, layers=3)) is None
    store.put(KEY, params(1))
    assert torch.equal((store.get(KEY) or {})[VECTORS], params(1)[VECTORS])


def test_a_new_task_starts_from_like_ones_on_the_same_model_only(tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    base = params(0)
    like = {COEFFICIENTS: base[COEFFICIENTS] * 2, VECTORS: base[VECTORS] + 1}  # cosine 1
    store.put(on("a"), base)
    store.put(on("b"), like)
    store.put(on("c"), {COEFFICIENTS: -base[COEFFICIENTS], VECTORS: base[VECTORS] + 100})
    store.put(on("d", backbone="another"), {**base, VECTORS: base[VECTORS] + 1000})
    found = store.near(on("new"), base[COEFFICIENTS])
    near = found.params
    assert near is not None and (found.count, len(found.cosines)) == (2, 3)
    assert found.cosines == pytest.approx((1.0, 1.0, -1.0))
    assert found.sentence().startswith("2 of 3 stored tasks on this model are like this one (cosine 1.000, 1.000)")
    # Two tasks with the same cosine weigh the same.
    assert torch.allclose(near[VECTORS], base[VECTORS] + 0.5, atol=1e-6)
    assert torch.allclose(near[COEFFICIENTS], base[COEFFICIENTS] * 1.5, atol=1e-6)
    assert near[VECTORS].dtype == torch.float32


def test_what_was_learned_on_the_same_texts_starts_nothing(tmp_path: Path) -> None:
    """Another seed's training texts may be this one's test questions, under whatever settings they were learned."""
    store, base = ContextStore(tmp_path), params(0)
    store.put(replace(KEY, data="1b"), base)
    store.put(replace(KEY, data="2c", task="news, dealt otherwise", template="{text}: {label}"), base)
    place = store.put(on("of before"), base)
    told = json.loads((place / "entry.json").read_text())
    del told["key"]["texts"], told["key"]["data"]  # as entries were written that did not say
    (place / "entry.json").write_text(json.dumps(told))
    assert store.get(KEY) is None and store.near(KEY, base[COEFFICIENTS]).cosines == ()
    store.put(on("others"), base)
    assert store.near(KEY, base[COEFFICIENTS]).count == 1


def test_weights_are_a_softmax_of_the_cosines(tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    asked = torch.zeros(2, 2, 2)
    asked[0, 0, 0] = 1.0
    tilted = asked.clone()
    tilted[0, 0, 1] = 0.5  # cosine 1 / sqrt(1.25)
    store.put(on("a"), {COEFFICIENTS: asked, VECTORS: torch.zeros(2, 2, 5)})
    store.put(on("b"), {COEFFICIENTS: tilted, VECTORS: torch.ones(2, 2, 5)})
    near = store.near(KEY, asked).params
    assert near is not None
    first, second = (torch.tensor(c / 0.5).exp() for c in (1.0, 1.25**-0.5))
    assert torch.allclose(near[VECTORS], (second / (first + second)).expand(2, 2, 5).float())
    away = store.near(KEY, -asked)
    assert away.params is None and "none of 2 stored tasks on this model is like this one" in away.sentence()
    assert "no other task" in store.near(replace(KEY, backbone="another"), asked).sentence()


@pytest.mark.parametrize("shapes", [((3, 2, 2), (3, 2, 5)), ((2, 2, 2), (2, 2, 7)), ((2, 2, 2), (3, 2, 5))])
def test_an_entry_of_other_shapes_is_refused(tmp_path: Path, shapes: tuple[tuple[int, ...], ...]) -> None:
    """An entry that says it is of this model, and is not."""
    store = ContextStore(tmp_path)
    for task, kinds in (("a", ((2, 2, 2), (2, 2, 5))), ("b", shapes)):
        tensors = dict(zip((COEFFICIENTS, VECTORS), map(torch.ones, kinds), strict=True))
        store.put(on(task), tensors)
    with pytest.raises(CheckpointError, match=r"which do not fit this model's .*: delete that folder"):
        store.near(KEY, torch.ones(2, 2, 2))


@pytest.mark.parametrize("file", ["params.safetensors", "entry.json"])
def test_a_damaged_entry_is_told(tmp_path: Path, file: str) -> None:
    store = ContextStore(tmp_path)
    place = store.put(KEY, params(0))
    (place / file).write_bytes((place / file).read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="is damaged: delete that folder"):
        store.get(KEY)
