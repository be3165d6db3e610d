"""Copies of data sets as they lie on the Hugging Face hub, read offline: AG News, SUBJ and Emotion with own lines.

Each file has the layout and the columns of the set's own repository, and none of its texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from fednl.data.classification import build
from fednl.data.classification_settings import ClassificationSettings
from fednl.data.labelled_texts import read_labelled
from fednl.data.settings import DataSettings
from fednl.data.well_known_texts import WELL_KNOWN
from fednl.errors import DataError, SettingsError
from small_run import byte_tokenizer

ROWS = 24


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def parquet(folder: Path, names: list[str], place: str, labels: list[int]) -> Path:
    """A repository with a card and one parquet file whose numbers have names."""
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    texts = [f"line {i} of kind {label}" for i, label in enumerate(labels)]
    made = datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)
    file = folder / place
    file.parent.mkdir(parents=True)
    made.to_parquet(file)
    pattern = f"{Path(place).parent}/train-*"
    card = (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {pattern}\n---\n# A card\n"
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return file


def ag_news(folder: Path) -> str:
    parquet(folder, [name for name, _ in WELL_KNOWN["ag-news"]], "data/train-00000-of-00001.parquet", turns(4))
    return str(folder)


def emotion(folder: Path) -> str:
    parquet(folder, [name for name, _ in WELL_KNOWN["emotion"]], "split/train-00000-of-00001.parquet", turns(6))
    return str(folder)


def subj(folder: Path) -> str:
    """JSONL with numbers, and their names in a column of their own."""
    folder.mkdir()
    names = [name for name, _ in WELL_KNOWN["subj"]]
    rows = [{"text": f"line {i}", "label": n, "label_text": names[n]} for i, n in enumerate(turns(2))]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


def turns(classes: int) -> list[int]:
    return [i % classes for i in range(ROWS)]


@pytest.mark.parametrize(
    ("make", "known", "words"),
    [
        (ag_news, "ag-news", ["World", "Sports", "Business", "Technology"]),
        (emotion, "emotion", ["sadness", "joy", "love", "anger", "fear", "surprise"]),
        (subj, "subj", ["objective", "subjective"]),
    ],
)
def test_a_copy_of_the_hubs_files_is_a_task_with_its_classes_by_one_word(
    tmp_path: Path, make: Callable[[Path], str], known: str, words: list[str]
) -> None:
    source = make(tmp_path / "copy")
    data = DataSettings(task="classification", clients=2, train=4, validation=1, test=3, tokens=80)
    own = ClassificationSettings(source=source, labels=(known,))
    clients = build(data, byte_tokenizer(), 0, "candidates", 0, own)
    everything = [one for splits in clients.values() for some in vars(splits).values() for one in some]
    assert len(everything) == 16
    assert all(list(one.candidates) == words for one in everything)
    tokenizer = byte_tokenizer()
    for one in everything if known != "subj" else []:  # the text of the others names the number of its class
        assert f"of kind {one.gold}\n" in tokenizer.decode(one.prompt_ids)


@pytest.mark.parametrize(("make", "split"), [(ag_news, "test"), (subj, "validation")])
def test_a_split_that_a_copy_lacks_is_told(tmp_path: Path, make: Callable[[Path], str], split: str) -> None:
    with pytest.raises(SettingsError, match=f'could not be loaded .*classification.split = "{split}"'):
        read_labelled(make(tmp_path / "copy"), split=split)


def test_one_parquet_file_keeps_the_names_of_its_numbers_and_a_class_below_zero_is_none(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a", ["World", "Sports"], "data/train-0.parquet", [1, 0])
    assert [one.label for one in read_labelled(str(file))] == ["Sports", "World"]
    hidden = parquet(tmp_path / "b", ["World", "Sports"], "data/test-0.parquet", [0, -1])
    with pytest.raises(DataError, match='row 2: the column "label" holds no class'):
        read_labelled(str(hidden))


def test_the_names_of_a_hub_file_in_another_column_are_read_by_its_name(tmp_path: Path) -> None:
    found = read_labelled(subj(tmp_path / "copy"), label="label_text")
    assert Counter(one.label for one in found) == {"objective": 12, "subjective": 12}


def test_a_table_that_lost_the_names_gets_them_by_number(tmp_path: Path) -> None:
    file = tmp_path / "ag.csv"
    file.write_text("text,label\n" + "".join(f"line {i},{n}\n" for i, n in enumerate(turns(4))), encoding="utf-8")
    data = DataSettings(task="classification", clients=2, train=3, validation=1, test=2, tokens=80)
    own = ClassificationSettings(source=str(file), labels=("ag-news",))
    one = build(data, byte_tokenizer(), 0, "candidates", 0, own)["client-01"].test[0]
    assert one.candidates[int(one.task)] == one.candidates[one.gold]
    with pytest.raises(DataError, match='has 0 texts of the class "4"'):
        build(data, byte_tokenizer(), 0, "candidates", 0, own.model_copy(update={"labels": ("emotion",)}))


@pytest.mark.parametrize("labels", [("agnews",), ("ag-news", "x=")])
def test_one_word_that_is_no_known_set_is_refused(labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="or one of: ag-news, subj, emotion, emo"):
        ClassificationSettings(labels=labels)


def test_every_known_set_has_a_word_of_its_own_for_each_class() -> None:
    for classes in WELL_KNOWN.values():
        names: Any = [*zip(*classes, strict=True)]
        assert all(len(set(column)) == len(column) for column in names)
