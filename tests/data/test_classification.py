"""The classification task: disjoint splits, uneven shares, prompts that end where the label begins, named refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fednl.data.batches import collate, demonstrations
from fednl.data.classification import build
from fednl.data.classification_settings import ClassificationSettings
from fednl.data.partition import partition_rows
from fednl.data.settings import DataSettings
from fednl.errors import DataError, SettingsError
from small_run import byte_tokenizer

LABELS = ("red", "green", "blue")


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write(tmp_path, dict.fromkeys(LABELS, 60))


def write(folder: Path, counts: dict[str, int]) -> str:
    rows = [{"text": f"{label} number {i}", "label": label} for label, count in counts.items() for i in range(count)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def made(source: str, data: dict[str, Any] | None = None, seed: int = 0, tokenizer: Any = None, **own: Any) -> Any:
    counts = {"clients": 4, "train": 15, "validation": 3, "test": 6, "tokens": 80, **(data or {})}
    settings = DataSettings(task="classification", **counts)
    classification = ClassificationSettings(source=source, **own)
    return build(settings, tokenizer or byte_tokenizer(), 0, "candidates", seed, classification)


def text(example: Any) -> str:
    return str(byte_tokenizer().decode(example.prompt_ids))


def test_no_text_is_in_two_places_and_every_number_is_as_asked(source: str) -> None:
    clients = made(source)
    everything = [text(one) for splits in clients.values() for some in vars(splits).values() for one in some]
    assert len(everything) == len(set(everything)) == 4 * (15 + 3 + 6)
    assert list(clients) == ["client-01", "client-02", "client-03", "client-04"]
    assert [len(splits.test) for splits in clients.values()] == [6] * 4
    assert [len(splits.validation) for splits in clients.values()] == [3] * 4
    assert sum(len(splits.train) for splits in clients.values()) == 60


def test_tests_are_balanced_and_training_is_dealt_unevenly(source: str) -> None:
    few, even = made(source, alpha=0.05), made(source, alpha=1000.0)
    for clients in (few, even):
        asked = Counter(one.gold for splits in clients.values() for one in splits.test)
        assert set(asked.values()) == {8}
        # No client is asked for one class only, although the classes are drawn in turn.
        assert all(len({one.gold for one in splits.test}) > 1 for splits in clients.values())

    def classes(clients: Any) -> list[int]:
        return [len({one.gold for one in splits.train}) for splits in clients.values()]

    assert sum(classes(few)) < sum(classes(even)) == 12
    assert partition_rows(few) == partition_rows(made(source, alpha=0.05))
    assert partition_rows(few) != partition_rows(made(source, alpha=0.05, seed=1))


def test_the_prompt_ends_where_the_label_begins_and_the_label_keeps_its_space(source: str) -> None:
    """F01: prompt and label together have the very tokens of the whole text."""
    tokenizer = byte_tokenizer()
    one = made(source, tokenizer=tokenizer)["client-01"].test[0]
    assert tokenizer.decode(one.prompt_ids) == f"Text: {text(one).split(chr(10))[0][6:]}\nCategory:"
    assert [tokenizer.decode(ids) for ids in one.candidate_ids] == [" blue", " green", " red"]
    joined = tokenizer(text(one) + " blue", add_special_tokens=False)["input_ids"]
    assert (*one.prompt_ids, *one.candidate_ids[0]) == tuple(joined)
    batch = collate([one], 0)
    assert [int(t) for t in batch["labels"][0] if t != -100] == list(one.candidate_ids[one.gold])


def test_a_tokenizer_that_marks_words_gets_the_labels_marked_once(source: str) -> None:
    """SentencePiece-like: what stands after a space is another token than at the start of a text."""
    vocabulary = {"<unk>": 0, "▁Category": 1, ":": 2, "▁red": 3, "▁green": 4, "▁blue": 5, "▁": 6, "\n": 7}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Split(":", "isolated")]
    )
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<unk>")
    one = made(source, tokenizer=tokenizer, template="{text} Category: {label}")["client-01"].test[0]
    assert one.candidate_ids == ((5,), (4,), (3,))


def test_demonstrations_are_the_clients_own_and_fit_the_context(source: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 140
    clients = made(source, tokenizer=tokenizer, demonstrations=9, alpha=1000.0)
    for splits in clients.values():
        own = {text(one) for one in splits.train}
        assert all(one.shots_ids == () for one in [*splits.train, *splits.validation])
        for one in splits.test:
            assert one.shots_ids[-len(one.prompt_ids) :] == one.prompt_ids
            assert len(one.shots_ids) + 6 <= 140
            shown = tokenizer.decode(one.shots_ids[: -len(one.prompt_ids)]).split("\n")
            assert len(shown) > 2
            for prompt, answer in zip(shown[0:-1:2], shown[1:-1:2], strict=True):
                assert f"{prompt}\nCategory:" in own
                assert answer == f"Category: {prompt.split()[1]}"
    held = made(source, {"hold_out_clients": ("client-02",)}, tokenizer=tokenizer)["client-02"]
    assert (held.train, held.validation) == ([], [])
    assert all(one.shots_ids == one.prompt_ids for one in held.test)


def test_demonstrations_say_where_prompt_label_and_line_break_end(source: str) -> None:
    examples = made(source)["client-01"].test[:3]
    batch = demonstrations(examples, 0)
    for row, one in enumerate(examples):
        answer = one.candidate_ids[one.gold]
        ids = (*one.prompt_ids, *answer, *one.separator_ids)
        assert batch["input_ids"][row, : len(ids)].tolist() == list(ids)
        assert int(batch["attention_mask"][row].sum()) == len(ids)
        ends = [len(one.prompt_ids) - 1, len(one.prompt_ids) + len(answer) - 1, len(ids) - 1]
        assert [int(batch[name][row]) for name in ("last", "label", "separator")] == ends


def test_words_may_stand_for_classes(source: str) -> None:
    one = made(source, labels=("red=warm", "green=fresh", "blue"))["client-01"].test[0]
    assert one.candidates == ("warm", "fresh", "blue")


@pytest.mark.parametrize("template", ["Text: {text}", "{label} {text}", "{text} {text} {label}", "{text} {label}."])
def test_a_template_without_its_placeholders_is_refused(template: str) -> None:
    with pytest.raises(ValidationError, match=r"write \{text\} once and \{label\} once, at the end"):
        ClassificationSettings(template=template)


@pytest.mark.parametrize(
    ("counts", "data", "own", "error", "words"),
    [
        (
            {"red": 60, "green": 60},
            {},
            {"labels": ("red", "green", "blue")},
            DataError,
            'has 0 texts of the class "blue"',
        ),
        (
            {"red": 60, "green": 60, "blue": 1},
            {},
            {},
            DataError,
            "has 1 texts of class 1 of 3 (sorted), and it takes 3",
        ),
        ({"red": 60, "green": 60}, {}, {"labels": ("red", "blue=x")}, DataError, 'has 0 texts of the class "blue"'),
        (
            {"red": 60, "green": 60, "blue": 60},
            {},
            {"labels": ("red", "green")},
            DataError,
            "leaves out 1 of the 3 classes",
        ),
        ({"red": 60}, {}, {}, DataError, "has one class only"),
        (
            {"red": 60, "green": 60, "blue": 60},
            {"clients": 1, "train": 2},
            {},
            DataError,
            "no client gets a training text of class ",
        ),
        ({"red": 60, "green": 60}, {"train": 500}, {}, DataError, "has 120 different texts, and 2036 are asked for"),
        (
            {"red": 90, "green": 90, "blue": 3},
            {"train": 0, "test": 9},
            {"least": 1},
            SettingsError,
            "with at least 1 each",
        ),
        ({"red": 60, "green": 60}, {"tokens": 12}, {}, DataError, "its prompt has"),
        ({"red": 60, "green": 60}, {"tokens": 4000}, {}, SettingsError, "more than the model's context of 2048 tokens"),
        ({"red": 60, "green": 60}, {"hold_out_clients": ("x",)}, {}, SettingsError, "does not take part"),
        (
            {"red": 60, "green": 60},
            {"clients": 1, "hold_out_clients": ("client-01",)},
            {},
            SettingsError,
            "names every",
        ),
    ],
)
def test_what_cannot_work_is_told_before_a_model_loads(
    tmp_path: Path,
    counts: dict[str, int],
    data: dict[str, Any],
    own: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 2048
    with pytest.raises(error) as caught:
        made(write(tmp_path, counts), data, tokenizer=tokenizer, **own)
    assert words in str(caught.value)
    assert "number" not in str(caught.value)  # a word of every text


def test_labels_that_are_one_to_the_tokenizer_are_refused(source: str) -> None:
    vocabulary = {"<unk>": 0, "Category": 1, ":": 2}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<unk>")
    with pytest.raises(
        SettingsError, match=r"class 1 of 3 \(sorted\) and class 2 of 3 \(sorted\) have the same tokens"
    ):
        made(source, tokenizer=tokenizer)


def test_a_long_text_is_cut_at_its_end_where_that_is_asked_for(source: str) -> None:
    one = made(source, {"tokens": 25}, long_texts="cut")["client-01"].test[0]
    assert len(one.prompt_ids) == 25
    assert text(one).startswith("Text: ") and text(one).endswith("\nCategory:")


def test_letters_are_no_answers_here(source: str) -> None:
    settings = DataSettings(task="classification")
    with pytest.raises(SettingsError, match='the classification task knows "candidates"'):
        build(settings, byte_tokenizer(), 0, "letters", 0, ClassificationSettings(source=source))


def test_as_many_clients_as_twice_the_classes_are_asked_for_several_classes_each(source: str) -> None:
    clients = made(source, {"clients": 6, "train": 5, "validation": 0, "test": 10})
    assert all(len({one.gold for one in splits.test}) == 3 for splits in clients.values())


def test_a_long_tail_over_classes_leaves_the_tests_balanced(tmp_path: Path) -> None:
    source = write(tmp_path, dict.fromkeys(LABELS, 90))
    clients = made(source, {"imbalance": 10.0}, alpha=1000.0)
    trained = Counter(one.task for splits in clients.values() for one in splits.train)
    assert set(trained) == set(LABELS) and abs(sum(trained.values()) - 60) <= 2
    most, middle, fewest = sorted(trained.values(), reverse=True)
    assert most / fewest == pytest.approx(10, rel=0.15) and most / middle == pytest.approx(10**0.5, rel=0.15)
    assert set(Counter(one.task for splits in clients.values() for one in splits.test).values()) == {8}
    assert {len(splits.train) for splits in made(source, {"imbalance": 10.0, "train": 0}).values()} == {0}
    with pytest.raises(DataError, match=r"data.imbalance = 10 takes \d+ training texts of class . of 3 .* are left"):
        made(source, {"imbalance": 10.0, "train": 40})
