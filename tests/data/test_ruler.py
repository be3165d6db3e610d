"""RULER's tasks, made offline: exact templates, lengths, one right answer, places that favour nothing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from scipy.stats import chisquare

from fednl.data.examples import Tokenizer
from fednl.data.ruler import RULER_TASKS, RulerExample, build_ruler
from fednl.data.ruler_lists import _vocabulary, frequent_words
from fednl.data.ruler_text import word_pairs
from fednl.errors import DataError, SettingsError
from fednl.seeding import python_rng
from small_run import byte_tokenizer

NAMES = sorted(RULER_TASKS)
TOKENS = 7000  # bytes here
LINE = {"niah_multikey_2": 80, "niah_multikey_3": 130}
"""What one more unit of haystack takes in bytes at most, where it is not a short sentence or a word."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def one(name: str, tokenizer: Tokenizer, tokens: int = TOKENS, seed: int = 0) -> RulerExample:
    return build_ruler(name, 1, tokens, tokenizer, seed)[0]


def total(example: RulerExample) -> int:
    return len(example.prompt_ids) + example.reserve_tokens


def evidence(example: RulerExample) -> str:
    """The last of the prompt's texts, after a worked example if there is one."""
    heads = ("Memorize and track", "Below is a numbered list")
    return example.prompt[max(example.prompt.rfind(head) for head in heads) :] if example.task in "vt cwe" else ""


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_as_long_as_its_budget_allows_and_never_longer(name: str, tokenizer: Tokenizer) -> None:
    smallest = int(refused(name, tokenizer, 1))
    for tokens in (smallest, smallest + 37, TOKENS):
        example = one(name, tokenizer, tokens)
        assert total(example) <= tokens
        assert example.prompt_ids == tuple(tokenizer([example.prompt], add_special_tokens=False)["input_ids"][0])
    assert total(example) > TOKENS - LINE.get(name, 60)
    assert total(example) >= 0.95 * TOKENS


class Pieces:
    """Some five letters, a digit or a sign a token, as of word pieces."""

    all_special_ids: list[int] = []  # noqa: RUF012

    def __call__(self, texts: list[str], **named: object) -> dict[str, list[list[int]]]:
        pieces = re.compile(r"\d| ?[A-Za-z]{1,5}|\s|[^\sA-Za-z\d]")
        return {"input_ids": [[len(piece) for piece in pieces.findall(text)] for text in texts]}


@pytest.mark.parametrize("name", NAMES)
def test_a_short_prompt_fills_95_percent_or_all_but_a_needle(name: str) -> None:
    pieces = Pieces()
    for tokens in (512, 1024, 2048):
        if tokens < int(refused(name, pieces, 1)):
            continue
        for example in build_ruler(name, 3, tokens, pieces, 0):
            lines = [f"{line}\n" for line in example.prompt.split("\n") if line.startswith("One of the special")]
            needle = max((len(ids) for ids in pieces(lines)["input_ids"]), default=0) if name in LINE else 0
            assert total(example) <= tokens and tokens - total(example) <= max(0.05 * tokens, needle)


def refused(name: str, tokenizer: Tokenizer, tokens: int) -> str:
    with pytest.raises(SettingsError, match=f"{name}; set it to at least") as error:
        one(name, tokenizer, tokens)
    return str(error.value).rstrip(".").rpartition(" ")[2]


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_budget_is_named_and_is_the_smallest(name: str, tokenizer: Tokenizer) -> None:
    smallest = int(refused(name, tokenizer, 1))
    assert int(refused(name, tokenizer, smallest - 1)) == smallest
    assert one(name, tokenizer, smallest).answers


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bytes_however_many_there_are(name: str, tokenizer: Tokenizer) -> None:
    few, more = build_ruler(name, 2, TOKENS, tokenizer, 5), build_ruler(name, 3, TOKENS, tokenizer, 5)
    assert few == more[:2]
    assert len({example.prompt for example in more}) == 3
    assert build_ruler(name, 1, TOKENS, tokenizer, 6)[0].prompt != few[0].prompt
    assert [(example.task, example.index) for example in more] == [(name, 0), (name, 1), (name, 2)]


ASKED = {
    "niah_single_1": ("A", "number", "is the", "is", 1),
    "niah_single_3": ("A", "uuid", "is the", "is", 1),
    "niah_multikey_1": ("A", "number", "is the", "is", 1),
    "niah_multikey_3": ("A", "uuid", "is the", "is", 1),
    "niah_multivalue": ("Some", "numbers", "are all the", "are", 4),
    "niah_multiquery": ("Some", "numbers", "are all the", "are", 4),
}


@pytest.mark.parametrize("name", sorted(ASKED))
def test_needles_have_rulers_words_and_one_right_answer(name: str, tokenizer: Tokenizer) -> None:
    some, kind, are_all, are, answers = ASKED[name]
    example = one(name, tokenizer)
    plural = kind.rstrip("s") + "s"
    head = f"{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    assert example.prompt.startswith(f"{head}I will quiz you about the {kind} afterwards.\n")
    tail = re.search(
        rf"\nWhat {are_all} special magic {kind} for (.+) mentioned in the provided text\? "
        rf"The special magic {kind} for (.+) mentioned in the provided text {are}$",
        example.prompt,
    )
    assert tail is not None and tail[1] == tail[2]
    asked = re.split(r", and |, ", tail[1])
    assert len(asked) == (4 if name == "niah_multiquery" else 1)
    needles = re.findall(rf"One of the special magic {plural} for (\S+) is: (\S+)\.(?=\s)", example.prompt)
    # Whoever reads the needles finds the answers, and nothing else, in the order of the question.
    found = [value for key in asked for of, value in needles if of == key]
    assert sorted(found) == sorted(example.answers) and len(found) == answers
    assert len({key for key, _ in needles}) == len(needles) / (4 if name == "niah_multivalue" else 1)
    assert all(example.prompt.count(answer) == 1 for answer in example.answers)
    assert len(example.depths) == answers


def test_haystacks_are_what_ruler_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    assert one("niah_single_1", tokenizer).prompt.count(noise) > 20
    keys = re.findall(r"numbers for (\S+) is", one("niah_multikey_2", tokenizer).prompt)
    assert len(keys) > 50 and all(re.fullmatch(r"[a-z]+-[a-z]+", key) for key in keys)
    text = tmp_path / "own.txt"
    text.write_text(" ".join(f"Sentence number {word} is mine." for word in ("one", "two", "three")), encoding="utf-8")
    own = build_ruler("niah_single_2", 1, 1000, tokenizer, 0, str(text))[0].prompt
    assert own.count("is mine.") > 10  # a short text comes round again


def test_a_filler_that_holds_the_answers_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fednl.data.ruler_needles._draw", lambda rng, what, count: ["1234567", "7654321"][:count])
    text = tmp_path / "own.txt"
    text.write_text("The number 1234567 stands everywhere.", encoding="utf-8")
    with pytest.raises(DataError, match="niah_single_2"):
        build_ruler("niah_single_2", 1, 2000, tokenizer, 0, str(text))


def test_a_chain_is_followed_to_all_its_names(tokenizer: Tokenizer) -> None:
    example = one("vt", tokenizer)
    assert example.prompt.startswith("Memorize and track the chain(s) of variable assignment hidden in the following ")
    text = evidence(example)
    value = re.search(r"assigned the value (\d{5}) in the text above\. Answer: ", text)
    assert value is not None
    assert text.endswith(f" 5 variables are assgined the value {value[1]}, they are: ")
    links = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
    names = [name for name, first in links.items() if first == value[1]]
    while len(names) < len(links):
        names += [name for name, first in links.items() if first == names[-1]]
    assert tuple(names) == example.answers and len(set(names)) == 5
    # The worked example has shorter names, its own value, and its answer.
    worked = example.prompt[: -len(text)]
    assert re.search(r"they are:  ([A-Z]{3} ){4}[A-Z]{3}\n\n$", worked)
    # Lines as RULER's code joins them: a space ends those of two names; only the haystack's last may be part of one.
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    for part, letters in ((worked, 3), (text, 5)):
        lines = part.partition("\n\n")[2].partition("\nQuestion: ")[0].split("\n")
        own = [line for line in lines if line.startswith("VAR ")]
        assert sorted(line.count("VAR") for line in own) == [1, 2, 2, 2, 2]
        assert all(re.fullmatch(r"VAR [A-Z]+ = (\d{5}|VAR [A-Z]+ )", line) for line in own)
        assert {len(line.split()[1]) for line in own} == {letters}
        others = [line for line in lines if line not in own]
        assert set(others[:-1] if part is text else others) == {noise} and noise.startswith(others[-1])


@pytest.mark.parametrize(("tokens", "often", "seldom"), [(3900, 6, 1), (12_000, 30, 3)])
def test_the_ten_common_words_are_the_ones_asked_for(
    tokenizer: Tokenizer, tokens: int, often: int, seldom: int
) -> None:
    example = one("cwe", tokenizer, tokens)
    listed = re.findall(r"(\d+)\. (\S+)", evidence(example))
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, count in counts.items() if count == often} == set(example.answers)
    assert {counts[word] for word in counts if word not in example.answers} <= {seldom}
    assert not any(word != other and word in other for word in counts for other in counts)


def test_more_pairs_than_there_are_become_threes() -> None:
    rng = python_rng(0, "words")
    for count, parts in ((100, {2: 100}), (3000, {2: 2304, 3: 696})):
        drawn = word_pairs(rng, count)
        assert len(set(drawn)) == count and Counter(word.count("-") + 1 for word in drawn) == parts
        assert all("\n".join(drawn).count(word) == 1 for word in drawn[:100])


def test_more_words_than_plain_ones_are_joined_ones_and_none_is_part_of_another() -> None:
    rng = python_rng(0, "words")
    for count, most in ((136, 1), (137, 2), (1500, 2), (20_000, 4)):
        drawn = _vocabulary(rng, count)
        assert len(set(drawn)) == count and max(word.count("-") + 1 for word in drawn) == most
        assert all("\n".join(drawn).count(word) == 1 for word in sorted(drawn, key=len)[:40] + drawn[:40])


def test_the_three_frequent_words_are_unique_at_every_size(tokenizer: Tokenizer) -> None:
    rng = python_rng(0, "fwe")
    for units in [*range(RULER_TASKS["fwe"].least_units, 400), *range(400, 4000, 97)]:
        assert frequent_words(rng, units, 500, []).is_clear
    example = one("fwe", tokenizer)
    coded = example.prompt.partition("coded words. ")[2].partition("\nQuestion: Do not")[0].split(" ")
    counts = Counter(coded).most_common()
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == example.answers
    assert counts[3][1] > counts[4][1]


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_1", "niah_multikey_2"])
def test_no_depth_is_favoured(name: str, tokenizer: Tokenizer) -> None:
    examples = build_ruler(name, 80, 1500, tokenizer, 1)
    bins = Counter(min(3, int(4 * example.depths[0])) for example in examples)
    assert chisquare([bins[place] for place in range(4)]).pvalue > 0.001


def test_an_unknown_task_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(SettingsError, match="choose from niah_single_1"):
        one("qa_1", tokenizer)
