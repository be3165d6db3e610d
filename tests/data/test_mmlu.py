"""MMLU: the paper's clients, what can be read, prompts as they are asked, and that no question is in two splits."""

from __future__ import annotations

import hashlib
import json
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fednl import fetching
from fednl.data import packaged_questions
from fednl.data.examples import Tokenizer
from fednl.data.mmlu import ChoiceExample, MmluSettings, build, read_groups
from fednl.data.packaged_questions import parse_question
from fednl.data.questions import read_questions
from fednl.data.settings import DataSettings
from fednl.errors import DataError, FednlError, SettingsError
from small_run import byte_tokenizer

SUBJECTS = {"law": ["jurisprudence"], "math": ["abstract_algebra", "college_mathematics"]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def row(number: int, subject: str, **changed: Any) -> dict[str, Any]:
    choices = [f"answer {number}{letter}" for letter in "abcd"]
    made = {"question": f"What is {number} of {subject}?", "choices": choices, "answer": number % 4, "subject": subject}
    return made | changed


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    sizes = {"jurisprudence": 24, "abstract_algebra": 12, "college_mathematics": 6, "anatomy": 5}
    return write_rows(tmp_path / "q.jsonl", [row(n, subject) for subject, size in sizes.items() for n in range(size)])


@pytest.fixture
def groups(tmp_path: Path) -> str:
    path = tmp_path / "groups.json"
    path.write_text(json.dumps({"clients": SUBJECTS}), encoding="utf-8")
    return str(path)


def made(source: str, groups: str, tokenizer: Tokenizer, answer: str = "letters", **changed: Any) -> Any:
    data = {"clients": 2, "tokens": 4000, "train": 100, "validation": 2, "test": 100}
    keys = {key: changed.pop(key) for key in list(changed) if key in DataSettings.model_fields}
    own = MmluSettings(source=source, groups=groups, **changed)
    return build(DataSettings(task="mmlu", **data | keys), tokenizer, 0, answer, 0, own)


def test_the_papers_clients_hold_its_subjects_each_once() -> None:
    groups = read_groups("paper")
    assert list(groups) == ["law-ethics", "humanities", "stem", "math-cs", "med-psy"]
    local = {"us_tort_law", "logiqa", "fcc_amateur_extra", "jee_math", "cissp", "medmcqa"}
    assert [len(set(held) - local) for held in groups.values()] == [8, 19, 11, 8, 10]  # 56; accounting is in none
    everything = [subject for held in groups.values() for subject in held]
    assert len(set(everything)) == len(everything) and local < set(everything)
    assert "professional_accounting" not in everything


def test_one_in_six_is_for_testing_as_in_the_paper(tokenizer: Tokenizer, tmp_path: Path, groups: str) -> None:
    source = write_rows(tmp_path / "all.jsonl", [row(n, "jurisprudence") for n in range(1098)])
    splits = made(source, groups, tokenizer, clients=1, validation=0, train=2000, test=200)["law"]
    assert (len(splits.train), len(splits.test)) == (915, 183)
    bounded = made(source, groups, tokenizer, clients=1, validation=7, train=20, test=5)["law"]
    assert [len(bounded.train), len(bounded.validation), len(bounded.test)] == [20, 7, 5]
    assert [one.index for one in bounded.train] == list(range(20))
    assert {one.split for one in bounded.validation} == {"validation"}


def test_no_question_is_in_two_places_and_no_client_depends_on_another(
    source: str, groups: str, tokenizer: Tokenizer
) -> None:
    both = made(source, groups, tokenizer, shots=2)
    for client, splits in both.items():
        asked = [one for part in vars(splits).values() for one in part]
        texts = [question_of(one, tokenizer) for one in asked]
        assert len(set(texts)) == len(texts)
        assert {one.subject for one in asked} <= set(SUBJECTS[client])
        shown = tokenizer.decode(asked[0].prompt_ids).split("\n\n")[:2]  # type: ignore[attr-defined]
        assert not any(text.partition(" Answer")[0] in shot for text in texts for shot in shown)
    assert made(source, groups, tokenizer, shots=2, clients=1)["law"] == both["law"]
    held_out = made(source, groups, tokenizer, hold_out_clients=("math",))["math"]
    assert (held_out.train, held_out.validation) == ([], []) and held_out.test


def question_of(one: ChoiceExample, tokenizer: Tokenizer) -> str:
    text: str = tokenizer.decode(one.prompt_ids)  # type: ignore[attr-defined]
    return text.split("\n\n")[-1]


def test_a_prompt_is_asked_in_the_papers_words_or_the_harnesss(
    tmp_path: Path, groups: str, tokenizer: Tokenizer
) -> None:
    source = write_rows(tmp_path / "one.jsonl", [row(n, "jurisprudence") for n in range(2)])

    def asked(answer: str, **changed: Any) -> tuple[str, ChoiceExample]:
        one = made(source, groups, tokenizer, answer, clients=1, validation=0, **changed)["law"].test[0]
        return question_of(one, tokenizer), one

    text, one = asked("letters")
    n = one.gold
    options = [f"{letter}. answer {n}{letter.lower()}" for letter in "ABCD"]
    assert text == f"Question: What is {n} of jurisprudence? {' '.join(options)} Answer: "
    assert [tokenizer.decode(ids) for ids in one.candidate_ids] == ["A", "B", "C", "D"]  # type: ignore[attr-defined]
    text, one = asked("letters", template="harness")
    options = [f"{letter}. answer {n}{letter.lower()}" for letter in "ABCD"]
    assert text == f"What is {n} of jurisprudence?\n" + "\n".join(options) + "\nAnswer: "
    text, one = asked("candidates")
    assert text == f"Question: What is {n} of jurisprudence? Answer:"
    # Bytes that all four texts share are read with the prompt only if the prompt alone goes on so: it does not.
    assert tokenizer.decode(one.candidate_ids[2]) == f" answer {n}c"  # type: ignore[attr-defined]


def test_shots_come_first_with_their_answers(source: str, groups: str, tokenizer: Tokenizer) -> None:
    splits = made(source, groups, tokenizer, shots=3)["law"]
    texts = [tokenizer.decode(one.prompt_ids).split("\n\n") for one in [*splits.train, *splits.test]]  # type: ignore[attr-defined]
    assert all(len(parts) == 4 for parts in texts)
    assert len({tuple(parts[:3]) for parts in texts}) == 1
    for shot in texts[0][:3]:
        number = int(shot.split()[3])
        assert shot.endswith(f" Answer: {'ABCD'[number % 4]}")
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 24 - 3


class JoiningTokenizer:
    """Joins the colon with what follows, as some tokenizers would: letters must not be encoded alone."""

    all_special_ids: list[int] = []  # noqa: RUF012

    def __call__(self, texts: list[str], **named: Any) -> dict[str, list[list[int]]]:
        joined = [text.replace(": ", "\0") for text in texts]
        return {"input_ids": [[ord(sign) for sign in text] for text in joined]}


def test_letters_are_tokenised_with_the_prompt(source: str, groups: str) -> None:
    one = made(source, groups, JoiningTokenizer())["law"].test[0]
    assert one.candidate_ids == tuple((ord(letter),) for letter in "ABCD")
    assert one.prompt_ids[-2:] == (ord("r"), 0)  # the colon and the space are one token, read with the prompt
    text = made(source, groups, JoiningTokenizer(), "candidates")["law"].test[0]
    assert chr(text.prompt_ids[-1]) == "r" and {ids[0] for ids in text.candidate_ids} == {0}


def test_long_questions_are_refused_or_left_out(source: str, groups: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [row(n, "jurisprudence") for n in range(12)]
    rows[4]["question"] *= 30
    long = write_rows(tmp_path / "long.jsonl", rows)
    with pytest.raises(DataError, match=r"line 5: its prompt has 881 tokens and data.tokens is 200"):
        made(long, groups, tokenizer, clients=1, tokens=200)
    splits = made(long, groups, tokenizer, clients=1, tokens=200, long_questions="leave-out")["law"]
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 11


def test_what_datasets_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, *config: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [row(n, "anatomy") for n in range(2)] if split == "test" else [row(9, "anatomy")]

    fake = types.SimpleNamespace(load_dataset=load, load_from_disk=lambda path: {"test": [row(5, "anatomy")]})
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    assert len(read_questions("cais/mmlu", ["test", "validation"])) == 3
    assert asked == [("cais/mmlu", ("all",), "test"), ("cais/mmlu", ("all",), "validation")]
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert read_questions(str(tmp_path), ["test"])[0].question == "What is 5 of anatomy?"
    monkeypatch.setattr(fake, "load_dataset", lambda *args, **named: 1 / 0)
    with pytest.raises(SettingsError, match=r'"cais/mmlu" could not be loaded, split "test" \(ZeroDivisionError\)'):
        read_questions("cais/mmlu", ["test"])
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="needs the package datasets"):
        read_questions("cais/mmlu", ["test"])


def test_jsonl_of_the_same_shape(tmp_path: Path) -> None:
    rows = [
        row(0, "anatomy", answer="C"),
        {**row(1, "x"), "topic": "high school biology"} | {"subject": None},
        row(0, "anatomy", answer="C"),
        row(2, "anatomy", split="dev"),
    ]
    del rows[1]["subject"]
    found = read_questions(write_rows(tmp_path / "q.jsonl", rows), ["test"])
    assert [(one.subject, one.gold) for one in found] == [("anatomy", 2), ("high_school_biology", 1)]


def test_a_question_stands_once_whoever_holds_it_and_however_it_is_written(tmp_path: Path) -> None:
    """Else one client's training question could be another's test question."""
    first = row(0, "anatomy", answer="C")
    spaced = first | {"subject": "virology", "question": "What is  0 of\nanatomy?", "choices": [*first["choices"]]}
    turned = first | {"subject": "nutrition", "choices": first["choices"][::-1], "answer": "B"}
    told: list[str] = []
    found = read_questions(write_rows(tmp_path / "q.jsonl", [first, spaced, turned]), ["test"], told.append)
    assert [(one.subject, one.right) for one in found] == [("anatomy", "answer 0c")] and not told


def test_questions_that_contradict_one_another_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [row(0, "anatomy"), row(1, "anatomy"), row(0, "anatomy", answer=1), row(0, "anatomy", answer=2)]
    told: list[str] = []
    found = read_questions(write_rows(tmp_path / "q.jsonl", rows), ["test"], told.append)
    assert [one.question for one in found] == ["What is 1 of anatomy?"]
    (text,) = told
    assert "1 question left out" in text and "line 1, and" in text and "line 3)" in text and "What is" not in text
    # The right text offered twice is no contradiction, whichever of the two the source calls right.
    twins = [row(2, "anatomy", choices=["a", "b", "a", "d"], answer=gold) for gold in (0, 2)]
    assert len(read_questions(write_rows(tmp_path / "q.jsonl", twins), ["test"], told.append)) == 1 and len(told) == 1
    with pytest.raises(DataError, match="holds no question"):
        read_questions(write_rows(tmp_path / "q.jsonl", rows[::2]), ["test"])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (row(0, "anatomy", answer=4), "line 2: .*index from 0 to 3"),
        (row(0, "anatomy", answer=True), "index from 0 to 3"),
        (row(0, "anatomy", choices=["a", "b", "c"]), "four texts"),
        *(
            (row(0, "anatomy", choices=["a", "b", "c", wrong]), "four texts, none empty")
            for wrong in ("", " ", None, ["d"], 4)
        ),
        (row(0, "anatomy", choices=["a", "a ", "a", "a"]), "line 2: .*all the same"),
        (row(0, " "), '"question" and "subject"'),
        (row(0, "anatomy", question=" "), '"question" and "subject"'),
        (row(0, ""), '"question" and "subject"'),
        ([1, 2], "something else than an object"),
    ],
)
def test_a_bad_row_is_named_and_not_shown(tmp_path: Path, bad: Any, words: str) -> None:
    source = write_rows(tmp_path / "q.jsonl", [row(0, "anatomy"), bad])
    with pytest.raises(DataError, match=words) as error:
        read_questions(source, ["test"])
    assert "What is" not in str(error.value)


def test_what_cannot_be_is_refused(source: str, groups: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    twice = tmp_path / "twice.json"
    twice.write_text('{"clients": {"a": ["anatomy"], "b": ["anatomy"]}}')
    cases: list[tuple[dict[str, Any], type[FednlError], str]] = [
        ({"answer": "recall"}, SettingsError, 'knows "letters" and "candidates"'),
        ({"clients": 3}, SettingsError, "mmlu.groups has 2: law, math"),
        ({"hold_out_clients": ("eve",)}, SettingsError, 'names "eve"'),
        ({"groups": str(twice)}, SettingsError, 'gives "anatomy" to two'),
        ({"groups": str(tmp_path / "none.json")}, SettingsError, "is not a JSON file"),
        ({"source": str(tmp_path / "none.jsonl")}, SettingsError, "not a file"),
        ({"shots": 24}, DataError, 'client "law" has no question'),
    ]
    for changed, kind, words in cases:
        with pytest.raises(kind, match=words):
            made(changed.pop("source", source), changed.pop("groups", groups), tokenizer, **changed)
    with pytest.raises(DataError, match=r"q\.jsonl holds no question"):
        read_questions(write_rows(tmp_path / "q.jsonl", []), ["test"])


@pytest.mark.parametrize(
    ("text", "ideal", "expected"),
    [
        ("Why?\nA. one\nB. two\nC. three\nD. four\nAnswer:", "C", ("Why?", ["one", "two", "three", "four"], 2)),
        (
            "Why?\n(A) 60\n(B) 90\n(C) 108\n(D) 126\n",
            "the correct answer is (B)",
            ("Why?", ["60", "90", "108", "126"], 1),
        ),
        ("Subject: X\n\nWhy\na) p\nb) q\nc) r\nd) s", "d) s", ("Subject: X\n\nWhy", ["p", "q", "r", "s"], 3)),
        ("Why?\nA. one\nB. two\nC. three", "A", None),
        ("Why?\nA. one\nB. two\nC. three\nD. four", "none", None),
    ],
)
def test_packaged_questions_are_split_into_their_parts(text: str, ideal: str, expected: Any) -> None:
    assert parse_question(text, ideal) == expected


def test_the_packaged_questions_become_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"question": "Why?\nA. one\nB. two\nC. three\nD. four\nAnswer:", "answer": "C"}
    broken = {"question": "Why?\nA. one", "answer": "A"}
    spoken = {"input": [{"content": "rules"}, {"content": "How?\n(A) p\n(B) q\n(C) r\n(D) s"}], "ideal": ["so (D)"]}

    def download(requirement: str, folder: Path, otherwise: str, error: type[FednlError]) -> Path:
        with zipfile.ZipFile(folder / "w.whl", "w") as archive:
            for member, subject in packaged_questions._MEMBERS.items():
                rows = [spoken if subject else {**plain, "topic": "high school biology"}, broken]
                content = "".join(json.dumps(one | ({} if subject else {"topic": "x"}) | one) + "\n" for one in rows)
                archive.writestr(f"evals/registry/data/{member}", content)
        return folder / "w.whl"

    monkeypatch.setenv("FEDNL_CACHE", str(tmp_path))
    monkeypatch.setattr(fetching, "download_wheel", download)
    with pytest.raises(DataError, match=r"has sha256 .* was expected"):
        read_questions("packaged", ["test"])
    wheel = download("", tmp_path, "", DataError)
    monkeypatch.setattr(packaged_questions, "_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetching, "download_wheel", lambda *args: wheel)
    found = read_questions("packaged", ["test"])
    assert [(one.subject, one.gold, one.choices[0]) for one in found] == [
        ("high_school_biology", 2, "one"),
        ("astronomy", 3, "p"),  # the same question of other sets is the first one's
    ]
    monkeypatch.setattr(fetching, "download_wheel", lambda *args: 1 / 0)
    assert read_questions("packaged", ["test"]) == found  # kept
