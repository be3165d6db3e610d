"""Filler: where it comes from, and how it is cut."""

from __future__ import annotations

import hashlib
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednl.data import standard_library
from fednl.data.examples import encode_texts
from fednl.data.fillers import SHARES, SPLITS, generated_text, load_filler, sentences, split_regions, tokenize
from fednl.data.haystack import Region
from fednl.errors import DataError, SettingsError


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes("Süß is here. And more.\n".encode())
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert load_filler(str(plain)).text == load_filler(str(marked)).text == "Süß is here. And more.\n"
    assert load_filler(str(plain)).sha256 == load_filler(str(marked)).sha256
    assert load_filler(str(plain)).sha256 == hashlib.sha256(plain.read_bytes()).hexdigest()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"data\.filler .*which is not a file"):
        load_filler(str(tmp_path / "missing.txt"))
    with pytest.raises(SettingsError, match="which is not a file"):
        load_filler(str(tmp_path))
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 is not UTF-8")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 \(byte 3\)") as error:
        load_filler(str(latin))
    assert "caf" not in str(error.value)
    assert error.value.__suppress_context__
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n ")
    with pytest.raises(DataError, match=r"empty\.txt holds no text \(4 bytes\)"):
        load_filler(str(empty))


def test_a_small_file_is_refused_with_sizes(tmp_path: Path, tokenizer: Any) -> None:
    small = tmp_path / "small.txt"
    small.write_text("One sentence here. Another sentence there. A third one. And a fourth one. The fifth.")
    with pytest.raises(
        DataError, match=r"small\.txt is too small: its 84 bytes .* each needs 320; .* at least"
    ) as error:
        split_regions(load_filler(str(small)), tokenizer, 320)
    assert "sentence" not in str(error.value).replace("repeated sentences", "")


def test_a_file_that_only_repeats_itself_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    again = tmp_path / "again.txt"
    again.write_text("The same sentence over and over. " * 3000)
    with pytest.raises(DataError, match="too small"):
        split_regions(load_filler(str(again)), tokenizer, 320)


def test_the_three_regions_are_disjoint_and_contiguous(filler_file: str, tokenizer: Any) -> None:
    filler = load_filler(filler_file)
    whole = tokenize(filler, tokenizer)
    regions = split_regions(filler, tokenizer, 700)
    joined = tuple(token for split in SPLITS for token in regions[split].ids)
    assert joined == whole.ids
    for split, share in zip(SPLITS, SHARES, strict=True):
        region = regions[split]
        assert len(region.ids) == pytest.approx(share * len(whole.ids), rel=0.02)
        assert region.starts[0] == 0
        ends = (*region.starts[1:], len(region.ids))
        for text, start, end in zip(region.sentences, region.starts, ends, strict=True):
            assert tokenizer.decode(region.ids[start:end]).strip() == text
    sets = [set(regions[split].sentences) for split in SPLITS]
    assert len(set.union(*sets)) == sum(map(len, sets))


def test_special_tokens_and_repeats_are_left_out(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "special.txt"
    path.write_text("First one. An end </s> inside. First one. Second one.")
    region = tokenize(load_filler(str(path)), tokenizer)
    assert region.sentences == ("First one.", "Second one.")
    assert not set(region.ids) & set(tokenizer.all_special_ids)


@given(st.text(alphabet="aB .!?\n\"'", max_size=300))
def test_sentences_lose_nothing_but_white_space(text: str) -> None:
    pieces = list(sentences(text))
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(piece[0] in "\n " and piece.strip() for piece in pieces)


def test_a_text_without_marks_is_cut_too() -> None:
    pieces = list(sentences("word " * 5000 + "x" * 5000))
    assert max(map(len, pieces)) <= 2001
    assert [*"".join(pieces)].count("d") == [*"".join(pieces)].count("x") == 5000


def test_generated_sentences_are_distinct_and_seeded() -> None:
    text = generated_text(random.Random(1), 4000)
    found = [piece.strip() for piece in sentences(text)]
    assert len(found) == len(set(found)) == 4000
    assert text == generated_text(random.Random(1), 4000)
    assert text != generated_text(random.Random(2), 4000)
    assert load_filler("generated").text == load_filler("generated").text
    assert "{" not in text


def test_the_standard_library_is_prose_and_comes_soon() -> None:
    standard_library.prose.cache_clear()
    began = time.process_time()
    filler = load_filler("standard-library")
    assert time.process_time() - began < 10
    assert 300_000 < filler.size_bytes < 1_700_000
    paragraphs = filler.text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert all(paragraph.isascii() and "\n" not in paragraph for paragraph in paragraphs)
    assert load_filler("standard-library").sha256 == filler.sha256


def test_a_python_without_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standard_library.prose.cache_clear()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no source files"):
        load_filler("standard-library")
    standard_library.prose.cache_clear()


def test_a_slice_avoids_the_needles_own_values(tokenizer: Any) -> None:
    texts = [f"\nNumber {i} is {1000 + i}." for i in range(200)]
    ids = encode_texts(tokenizer, texts)
    starts = [0]
    for piece in ids[:-1]:
        starts.append(starts[-1] + len(piece))
    region = Region(tuple(t for piece in ids for t in piece), tuple(starts), tuple(t.strip() for t in texts))
    rng = random.Random(0)
    for _ in range(200):
        start = region.draw(300, ["1050", "1120"], rng)
        assert start in starts
        assert start + 300 <= len(region.ids)
        text = tokenizer.decode(region.ids[start : start + 300])
        assert not any(value in text for value in ("1050", "1120"))
    with pytest.raises(DataError, match=r"data\.filler"):
        region.draw(300, ["Number"], rng)
