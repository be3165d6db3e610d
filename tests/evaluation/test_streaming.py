"""Streaming cross-entropy: every token once, in the bin of its position, whatever the pieces; logits never whole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from fednl.data.documents import documents
from fednl.errors import DataError, NonFiniteError, SettingsError
from fednl.evaluation.streaming import StreamNats, coarser, stream_nats, streaming_rows, strided_nats
from fednl.memory import MemoryCache, MemoryConfig
from fednl.memory.attach import attach_memory
from small_run import byte_tokenizer, tiny_backbone

VOCABULARY = 258


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("streaming"))


def text(count: int, seed: int = 0) -> list[int]:
    draw = torch.randint(2, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return [int(one) for one in draw]


class Told(nn.Module):
    """A model with logits by position; it notes which tokens it was shown and how many logits it made at once."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.told, self.shown, self.largest = logits, [], 0

    def forward(self, input_ids: Tensor, use_cache: bool = True, **named: Any) -> Any:
        first = len(self.shown) if use_cache else 0
        self.shown += input_ids[0].tolist()
        made = torch.stack([self.told(first + i) for i in range(input_ids.shape[1])])
        self.largest = max(self.largest, len(made))
        return type("Output", (), {"logits": made[None]})()

    def forward_with(self, past_key_values: Any) -> None: ...


class Nothing:
    layers: tuple[Any, ...] = ()


def read(model: nn.Module, ids: list[int], **named: Any) -> StreamNats:
    named.setdefault("make_cache", lambda model: Nothing())
    return stream_nats(model, ids, **named)


def test_a_uniform_model_has_the_logarithm_of_the_vocabulary_in_every_bin() -> None:
    model = Told(lambda position: torch.zeros(VOCABULARY))
    ids = text(2600)
    done: list[int] = []
    found = read(model, ids, bin_tokens=1024, piece_tokens=100, on_read=done.append)
    assert found.nats == pytest.approx([math.log(VOCABULARY)] * 3, abs=1e-6)
    assert found.tokens == (1023, 1024, 552)
    assert model.shown == ids and done[-1] == 2600
    assert model.largest == 100  # logits of a piece, never of the text


def test_a_model_that_knows_the_text_has_none() -> None:
    ids = text(300)
    model = Told(lambda position: 60.0 * nn.functional.one_hot(torch.tensor([*ids, 0][position + 1]), VOCABULARY))
    assert read(model, ids, bin_tokens=64).nats == pytest.approx([0.0] * 5, abs=1e-6)


def test_a_token_counts_in_the_bin_of_its_own_position() -> None:
    # Only the token at position 64 is unforeseen: it is the second bin's first.
    ids = text(128)
    sure = [60.0 * nn.functional.one_hot(torch.tensor(token), VOCABULARY) for token in [*ids[1:], 0]]
    model = Told(lambda position: torch.zeros(VOCABULARY) if position == 63 else sure[position])
    found = read(model, ids, bin_tokens=64, piece_tokens=50)
    assert found.nats == pytest.approx([0.0, math.log(VOCABULARY) / 64], abs=1e-6)


@pytest.mark.parametrize("piece", [1, 7, 64, 200])
def test_pieces_change_nothing_and_one_pass_says_the_same(folder: Path, piece: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = text(130)
    found = read(model, ids, make_cache=lambda m: DynamicCache(config=m.config), bin_tokens=50, piece_tokens=piece)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    losses = nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    expected = [losses[:49].mean(), losses[49:99].mean(), losses[99:].mean()]
    assert found.nats == pytest.approx([float(one) for one in expected], abs=1e-5)
    a_token = found.kv_bytes[0] // 50
    assert a_token > 0 and found.kv_bytes == (50 * a_token, 100 * a_token, 130 * a_token)  # keys and values grow


@pytest.mark.parametrize("layers", ["last:1", "none"])
def test_with_a_window_the_cache_has_the_same_bytes_in_the_first_and_the_last_bin(folder: Path, layers: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    attach_memory(model, MemoryConfig(layers=layers, rank=2, window_tokens=32, sink_tokens=2))
    ids = text(400)
    ways = [read(model, ids, make_cache=MemoryCache, bin_tokens=100, piece_tokens=piece) for piece in (9, 100)]
    for found in ways:
        assert len(set(zip(found.state_bytes, found.kv_bytes, strict=True))) == 1
        assert found.nats == pytest.approx(ways[0].nats, abs=1e-5)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(NonFiniteError, match="not scored"):
        read(Told(lambda position: torch.full((VOCABULARY,), math.nan)), text(10))


@pytest.mark.parametrize(
    ("count", "context", "stride"), [(50, 64, 32), (64, 64, 1), (200, 64, 32), (200, 64, 63), (65, 8, 3)]
)
def test_strided_scoring_counts_each_token_once(folder: Path, count: int, context: int, stride: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = text(count)
    with torch.no_grad():
        expected = []
        for place in range(1, count):
            # The window that scores a token: the first that reaches it.
            end = context
            while end <= place:
                end = min(end + stride, count)
            first = max(0, end - context)
            logits = model(torch.tensor([ids[first:place]])).logits[0, -1].double()
            expected.append(float(nn.functional.cross_entropy(logits, torch.tensor(ids[place]))))
    assert strided_nats(model, ids, context, stride) == pytest.approx(sum(expected) / (count - 1), abs=1e-5)
    if count <= context:
        whole = read(model, ids, make_cache=lambda m: DynamicCache(config=m.config), bin_tokens=count)
        assert strided_nats(model, ids, context, stride) == pytest.approx(whole.nats[0], abs=1e-5)


def test_strided_scoring_of_a_uniform_model() -> None:
    model = Told(lambda position: torch.zeros(VOCABULARY))
    assert strided_nats(model, text(333), 64, 48) == pytest.approx(math.log(VOCABULARY), abs=1e-6)
    with pytest.raises(ValueError, match="stride"):
        strided_nats(model, text(10), 8, 8)


def test_rows_hold_the_level_the_change_and_the_paired_difference() -> None:
    def some(*levels: tuple[float, float]) -> list[StreamNats]:
        return [StreamNats(level, (99, 100), (4, 4), (10, 10)) for level in levels]

    arms = {
        "federated": some((2.0, 1.8), (4.0, 3.9), (3.0, 2.85)),
        "window-only": some((2.1, 2.25), (4.0, 4.3), (2.9, 3.2)),
    }
    rows = streaming_rows(arms, seed=0, bin_tokens=100)
    level = [r for r in rows if r["method"] == "federated" and r["metric"] == "nats_per_token"]
    assert [(r["bin"], r["from_token"], r["value"], r["n"]) for r in level] == [
        (0, 0, 3.0, 3),
        (1, 100, pytest.approx(2.85), 3),
    ]
    change = [r["value"] for r in rows if r["method"] == "federated" and r["metric"] == "change_percent"]
    assert change == pytest.approx([0.0, (-10 - 2.5 - 5) / 3])
    gaps = [r for r in rows if r["metric"] == "difference"]
    assert [round(r["value"], 9) for r in gaps] == [0.0, -0.4]
    assert gaps[0]["verdict"] == "no clear difference" and gaps[1]["verdict"] == "better"
    assert all((r["state_bytes"], r["kv_bytes"]) == (4, 10) for r in level)
    with pytest.raises(SettingsError, match="other texts"):
        streaming_rows({**arms, "window-only": [StreamNats((2.0,), (5,), (0,), (1,))] * 2}, seed=0)
    # Two texts have no spread to speak of, nor have texts of one and the same gap: no interval and no verdict.
    for few in (1, 2):
        rows = streaming_rows({name: read[:few] for name, read in arms.items()}, seed=0)
        assert rows and not any({"low", "high", "verdict"} & r.keys() for r in rows)
    alike = {name: some(*[(level, level)] * 4) for name, level in (("federated", 2.0), ("window-only", 2.1))}
    assert not any({"low", "high", "verdict"} & r.keys() for r in streaming_rows(alike, seed=0))


def test_a_bin_without_a_scored_token_has_no_row_and_change_is_from_the_first_that_has_one() -> None:
    """With bins of one token the first holds none but the text's first one."""
    read = [StreamNats((0.0, 2.0, 3.0), (0, 1, 1), (1,) * 3, (1,) * 3)] * 2
    rows = streaming_rows({"federated": read, "window-only": read}, seed=0, bin_tokens=1)
    assert {row["bin"] for row in rows} == {1, 2}
    assert [row["value"] for row in rows if row["metric"] == "change_percent"] == pytest.approx([0.0, 50.0] * 2)
    known = [StreamNats((0.0, 2.0), (9, 10), (1,) * 2, (1,) * 2)]  # foreseen to the end: no share of nothing
    assert {row["metric"] for row in streaming_rows({"federated": known}, seed=0)} == {"nats_per_token"}


def test_documents_are_whole_and_apart(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"Sentence {n} of a long text is here." for n in range(2000)), encoding="utf-8")
    tokenizer = byte_tokenizer()
    found = documents(str(path), tokenizer, 5, 2000)
    texts = [tokenizer.decode(ids) for ids in found]
    assert [len(ids) for ids in found] == [2000] * 5
    numbers = [set(text.split()) & {str(n) for n in range(2000)} for text in texts]
    assert all(text.strip().startswith("Sentence") for text in texts)
    assert not any(numbers[i] & numbers[j] for i in range(5) for j in range(i))
    with pytest.raises(DataError, match=r"holds \d stretches of 5000 tokens"):
        documents(str(path), tokenizer, 5, 5000)


def test_fine_bins_in_long_pieces_are_the_same_and_add_up_to_coarse_ones(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = text(150)
    cache = {"make_cache": lambda model: DynamicCache(config=model.config)}
    fine = stream_nats(model, ids, bin_tokens=8, piece_tokens=64, across_bins=True, **cache)
    again = stream_nats(model, ids, bin_tokens=8, piece_tokens=5, **cache)
    assert fine.tokens == again.tokens == (7, *[8] * 17, 6)
    assert fine.nats == pytest.approx(again.nats, abs=1e-5)
    assert fine.kv_bytes[0] == fine.kv_bytes[7] > again.kv_bytes[0]
    coarse, whole = coarser(fine, 4), stream_nats(model, ids, bin_tokens=32, piece_tokens=32, **cache)
    assert coarse.tokens == whole.tokens
    assert coarse.nats == pytest.approx(whole.nats, abs=1e-5)
    assert coarser(fine, 1) == fine and coarser(coarse, 3) == coarser(fine, 12)
