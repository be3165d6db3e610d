"""`[federation] preset`: what it stands for, what wins over it, and that a run trains with each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fednl.arms import adapters_of
from fednl.config import Config, load_config
from fednl.errors import SettingsError
from fednl.federation.algorithms import PRESETS
from fednl.reproduce import settings as reproduce
from fednl.training import train
from small_run import settings, tiny_backbone

CONFIGS = Path(__file__).parents[1] / "configs"


def written(folder: Path, text: str) -> Path:
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    return folder / "mine.toml"


LORA = '[federation]\npreset = "fedavg-lora"\n'


def test_a_preset_is_replaced_by_its_settings_and_those_beside_it_win(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, f'{LORA}quorum = 2\nshared = ["*.lora_B"]\n[lora]\nalpha = 4.0\n'))
    federation, lora = config.federation, config.lora
    assert (federation.adapters, federation.algorithm, federation.quorum) == (("lora",), "fedavg", 2)
    assert (federation.shared, lora.rank, lora.alpha) == (("*.lora_B",), 16, 4.0)
    assert "preset" not in config.to_dict()["federation"]
    assert load_config(written(tmp_path, config.to_toml())) == config


def test_an_overriding_preset_wins_over_the_file_and_other_overrides_over_it(tmp_path: Path) -> None:
    path = written(tmp_path, '[federation]\npreset = "fed-mamba"\nshared = "theta"\n')
    config = load_config(path, ["lora.rank=3", "federation.preset=fedavg-lora"])
    assert (config.federation.shared, config.lora.rank, config.lora.targets) == ("lora", 3, "all-linear")
    assert config.memory.layers != "none"
    again = Config().with_overrides(["federation.preset=fedavg-lora"])
    assert (again.federation.shared, again.lora.rank) == ("lora", 16)
    prox = Config().with_overrides(["federation.algorithm=fedprox", "fedprox.mu=0.5"])
    assert prox.with_overrides(["federation.preset=fednl"]).federation.algorithm == "fedavg"


def test_the_last_preset_that_is_named_wins_whole(tmp_path: Path) -> None:
    mamba = Config.from_dict({"federation": {"preset": "fed-mamba"}, "lora": {"alpha": 4.0}})
    fednl = mamba.with_overrides(["federation.preset=fednl"])
    assert fednl == Config.from_dict({"federation": {"preset": "fednl"}, "lora": {"alpha": 4.0}})
    assert (fednl.memory, fednl.lora.rank, fednl.lora.targets) == (Config().memory, 0, "all-linear")
    step = mamba.with_overrides(["run.seed=3"])
    assert step.with_overrides(["federation.preset=fednl"]) == fednl.with_overrides(["run.seed=3"])
    assert fednl.with_overrides(["federation.preset=fed-mamba"]) == mamba
    four = mamba.with_overrides(["lora.rank=4"]).with_overrides(["federation.preset=fednl"])
    assert (four.lora.rank, four.memory) == (4, Config().memory)
    icl = Config.from_dict({"federation": {"preset": "ifed-icl"}, "evaluation": {"arms": ["federated"]}})
    assert icl.with_overrides(["federation.preset=fednl"]).federation == Config().federation
    both = ["federation.preset=fed-mamba", "federation.preset=fednl"]
    assert load_config(written(tmp_path, ""), both) == load_config(written(tmp_path, ""), both[1:])
    explicit = ["memory.window-tokens=9", "federation.preset=fednl"]
    assert mamba.with_overrides(explicit).memory.window_tokens == 9


@pytest.mark.parametrize(
    ("name", "file", "sets"),
    [
        ("fednl", "needles", ()),
        ("ifed-icl", "ifed-icl", ()),
        ("fed-mamba", "fed-mamba", ()),
        (
            "fedavg-lora",
            "needles",
            (*reproduce.FEDAVG_LORA, "federation.adapters=lora", *reproduce.paper_lora(16, "1e-2")),
        ),
    ],
)
def test_a_preset_is_the_method_of_the_settings_that_reproduce_it(name: str, file: str, sets: tuple[str, ...]) -> None:
    def method(config: Config) -> list[Any]:
        own, lora = config.federation, config.lora
        trained = (lora.rank, lora.scale_alpha, lora.targets) if lora.rank else ()
        kinds = [kind for kind, _ in adapters_of(config, "own")]
        return [kinds, own.algorithm, own.shared, trained, config.combine, config.privacy, config.method_settings]

    preset = Config.from_dict({"federation": {"preset": name}})
    told = load_config(CONFIGS / f"{file}.toml", sets)
    assert method(preset) == method(told)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (
            '[federation]\npreset = "fednk"\n',
            [],
            'mine.toml: [federation] preset = "fednk" is unknown; did you mean "fednl"?',
        ),
        (
            "[federation]\npreset = 3\n",
            [],
            "preset = 3 is unknown; the presets are: fednl, ifed-icl, fedavg-lora, fed-mamba.",
        ),
        ("", ["federation.preset=what"], '--set: [federation] preset = "what" is unknown; the presets are: fednl, '),
        ('[federation]\nalgorithm = "fednl"\n', [], 'it is a preset: write preset = "fednl" instead.'),
        ("lora = 3\n" + LORA, [], "lora must be a section"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, overrides: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_config(written(tmp_path, text), overrides)
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"fed-mamba"}))  # which tests/test_fed_mamba.py trains
def test_a_run_trains_with_the_preset_alone(backbone: Path, tmp_path: Path, name: str) -> None:
    sections: dict[str, dict[str, Any]] = {"federation": {"preset": name}, "evaluation": {"arms": ["federated"]}}
    data: dict[str, Any] = {"clients": 2, "train": 2, "validation": 1, "test": 1}
    if name == "ifed-icl":
        rows = [{"text": f"{word} {i}", "label": word} for word in ("sun", "rain") for i in range(40)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data |= {"task": "classification", "tokens": 40, "train": 8}
        sections["classification"] = {"source": str(tmp_path / "rows.jsonl"), "demonstrations": 2, "least": 2}
    training = {"rounds": 2, "local-steps": 1}
    run = train(settings(backbone, data=data, training=training, **sections), tmp_path / "run")
    told = run.read_json("config.json")
    for section, keys in PRESETS[name].items():
        adapters = {"adapters": [keys["adapters"]]} if "adapters" in keys else {}
        assert {key: told[section][key] for key in keys} == {**keys, **adapters}
    assert all(row["updated"] for row in run.read_jsonl("rounds.jsonl"))
