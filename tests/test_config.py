from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fednl.config import Config, load_config
from fednl.errors import SettingsError
from fednl.federation.algorithms import ALGORITHMS
from fednl.memory.settings import MemoryConfig

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "configs").rglob("*.toml"))


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def _write(text: str, encoding: str = "utf-8") -> Path:
        path = tmp_path / "mine.toml"
        path.write_bytes(text.encode(encoding))
        return path

    return _write


def refusal(path: Path | str, *overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_parses(path: Path) -> None:
    config = load_config(path)
    assert Config.from_dict(json.loads(config.to_json())) == config


def test_some_configs_are_shipped() -> None:
    assert {"demo.toml", "needles.toml"} <= {path.name for path in SHIPPED}


def test_the_empty_file_is_every_default(write) -> None:  # type: ignore[no-untyped-def]
    config = load_config(write(""))
    assert config == Config()
    assert (config.memory.window_tokens, config.memory.layers, config.memory.rank) == (64, "last:15", 8)
    assert (config.training.rounds, config.training.local_lr, config.run.seed) == (4, 3e-3, 0)
    assert (config.federation.algorithm, config.federation.shared) == ("fedavg", "theta")


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_what_is_printed_reads_back(write, tmp_path: Path, algorithm: str) -> None:  # type: ignore[no-untyped-def]
    reads = ALGORITHMS[algorithm].traits.needs_context
    adapter, task = ("context-vectors", "classification") if reads else ("memory", "needles")
    shared = '["theta", "lora"]' if ALGORITHMS[algorithm].traits.needs_lora else '"theta"'
    first = load_config(
        write(
            f'[federation]\nalgorithm = "{algorithm}"\nadapters = "{adapter}"\nshared = {shared}\n'
            '[lora]\nrank = 16\n[training]\noptimizer-state = "reset"\n'
            f'[data]\ntask = "{task}"\nfiller = "a \\"b\\" \\\\ ü\\t.txt"\n[evaluation]\narms = ["federated"]\n'
        )
    )
    again = tmp_path / "again.toml"
    again.write_text(first.to_toml(), encoding="utf-8")
    second = load_config(again)
    assert second.to_dict() == first.to_dict()
    assert second.hash == first.hash
    assert second.to_toml() == first.to_toml()


def test_lists_keep_their_order(write) -> None:  # type: ignore[no-untyped-def]
    config = load_config(write('[data]\nhold-out-clients = ["uuid-code", "passkey"]\n'))
    assert list(config.data.hold_out_clients) == ["uuid-code", "passkey"]
    assert Config.from_dict(config.to_dict()) == config


def test_the_hash_knows_every_setting_but_the_folder(write) -> None:  # type: ignore[no-untyped-def]
    path = write("")
    base = load_config(path).hash
    assert load_config(path, ["run.out=elsewhere"]).hash == base
    for change in ("run.seed=1", "training.rounds=5", "memory.mixing=convex", "data.tokens=321"):
        assert load_config(path, [change]).hash != base
    assert load_config(write("[training]\nrounds = 4\n")).hash == base


def test_a_bom_is_no_part_of_the_settings(write) -> None:  # type: ignore[no-untyped-def]
    assert load_config(write("[run]\nseed = 3\n", "utf-8-sig")).run.seed == 3


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.rounds=2", "training", "rounds", 2),
        ("training.local-lr=1e-2", "training", "local_lr", 0.01),
        ("memory.mixing=convex", "memory", "mixing", "convex"),
        ('memory.mixing="convex"', "memory", "mixing", "convex"),
        ("data.filler=my text.txt", "data", "filler", "my text.txt"),
        (" run.seed = 7 ", "run", "seed", 7),
    ],
)
def test_overrides_win(write, override: str, section: str, key: str, value: object) -> None:  # type: ignore[no-untyped-def]
    config = load_config(write("[training]\nrounds = 9\n[run]\nseed = 1\n"), [override])
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[memory]\nwindow_tokens = 3\n", ['"window_tokens"', "[memory]", 'did you mean "window-tokens"?']),
        ("[trainig]\nrounds = 3\n", ["[trainig]", 'did you mean "training"?']),
        ("[federation]\nrounds = 3\n", ["[federation]", "it belongs in [training]"]),
        ("rounds = 3\n", ['"rounds"', "above every section", "[training]"]),
        ("training = 3\n", ["[training]", "section"]),
        ('[memory]\nmixing = "convx"\n', ["mixing", '"convx"', 'did you mean "convex"?']),
        ('[training]\nrounds = "4"\n', ["rounds", '"4"', "integer"]),
        ("[training]\nrounds = 4.0\n", ["rounds", "4.0", "integer"]),
        ("[training]\nrounds = 0\n", ["rounds = 0", "greater than or equal to 1"]),
        ("[training]\nlocal-lr = nan\n", ["local-lr = nan", "finite"]),
        ("[run]\nseed = 2026-01-01\n", ["seed", "2026-01-01", "integer"]),
        ("[run]\nseed = -1\n", ["seed = -1"]),
        ('[memory]\nlayers = "last:0"\n', ["layers", '"last:0"', '"last:n"']),
        ('[federation]\nalgorithm = "fedav"\n', ["algorithm", '"fedav"', 'did you mean "fedavg"?']),
        ('[federation]\nalgorithm = "ffa-lora"\n', ['algorithm = "ffa-lora"', "[lora] rank = 0", "1 or more"]),
        ('[federation]\nalgorithm = "flora"\n[lora]\nrank = 4\n', ["[lora] rank = 4", "flora", "9 or more"]),
        (
            '[federation]\nalgorithm = "flexlora"\nshared = "lora"\n[lora]\nrank = 4\n',
            ['optimizer-state = "keep"', '"flexlora"', 'set it to "reset"'],
        ),
        (
            '[federation]\nalgorithm = "ffa-lora"\n[lora]\nrank = 2\n',
            ['shared = "theta" lets no LoRA factor out', 'add "lora"'],
        ),
        (
            '[federation]\nalgorithm = "ffa-lora"\nshared = ["*.lora_A"]\n[lora]\nrank = 2\n',
            ['shared = ["*.lora_A"] lets no LoRA factor B out', 'add "lora"'],
        ),
        (
            '[federation]\nalgorithm = "flexlora"\nshared = ["theta", "layers.*B"]\n[lora]\nrank = 2\n',
            ["lets no LoRA factor A out"],
        ),
        ('[federation]\nlora-ranks = ["passkey=2"]\n', ['lora-ranks = "passkey=2"', "0 LoRA components"]),
        ('[federation]\nlora-ranks = ["a=5"]\n[lora]\nrank = 4\n', ['lora-ranks = "a=5"', "4 LoRA", "[lora] rank"]),
        (
            '[federation]\nlora-ranks = ["a=2"]\n[lora]\nrank = 4\n[combine]\nnorm-cap = 1.0\n',
            ["lora-ranks takes the mean", "norm-cap = 0"],
        ),
        ('[federation]\nlora-ranks = ["a:5"]\n', ["lora-ranks", "PATTERN=RANK"]),
        ('[federation]\nlora-ranks = ["a=0"]\n', ["lora-ranks", "at least 1"]),
        ('[federation]\nalgorithm = "fedprox"\n[fedprox]\nmu = -1.0\n', ["[fedprox] mu = -1.0", "equal to 0"]),
        ('[federation]\nalgorithm = "fedssi"\n[fedssi]\nlocality = 0.0\n', ["locality = 0.0", "greater than 0"]),
        (
            '[federation]\nalgorithm = "fedssi"\n[fedssi]\nlocality = 0.01\nsurrogate-lr = 0.1\n',
            ["[fedssi] surrogate-lr = 0.1", "= 49.5 is 2 or more", "set surrogate-lr below 0.0404", "locality = 0.01."],
        ),
        ('[federation]\nalgorithm = "fedadam"\n[fedadam]\nbetas = [0.9]\n', ["betas = [0.9]: write 2 values, not 1."]),
        ('[federation]\nalgorithm = "fedyogi"\n[fedyogi]\nbetas = [0.9, 0.9, 0.9]\n', ["write 2 values, not 3."]),
        ('[federation]\nshared = ["projecton"]\n', ['"projecton" is neither', 'did you mean "projection"?']),
        ('[federation]\nshared = "w"\n', ["neither a preset, a group nor a pattern; these are memory, theta, lora"]),
        ("[federation]\nquorum = 9\n", ["quorum = 9, but 7 clients train", "lower quorum."]),
        (
            '[federation]\nclients-per-round = 3\n[data]\nclients = 3\nhold-out-clients = ["passkey"]\n',
            ["clients-per-round = 3, but 2 clients train"],
        ),
        (
            '[data]\nclients = 1\nhold-out-clients = ["passkey"]\n',
            ["[data] hold-out-clients names every client, so that none trains: leave one out."],
        ),
        ("[fedavgm]\nmomentum = 0.5\n", ["[fedavgm]", 'algorithm = "fedavgm"']),
        ('[federation]\nalgorithm = "fedavgm"\n[fedavgm]\nmomentm = 0.5\n', ['did you mean "momentum"?']),
        (
            '[federation]\nalgorithm = "fedavgm"\n[fedavgm]\nmomentum = 2.0\n',
            ["momentum = 2.0", "less than 1"],
        ),
        ("[run\n", ["not valid TOML", "line 1"]),
        ("[run]\nseed = 1\nseed = 2\n", ["not valid TOML"]),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(write, text: str, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    path = write(text)
    message = refusal(path)
    assert message.startswith(str(path))
    for word in words:
        assert word in message, message


def test_an_override_is_blamed_for_its_own_faults(write) -> None:  # type: ignore[no-untyped-def]
    path = write("")
    assert refusal(path, "training.rounds=four").startswith("--set: [training] rounds")
    assert refusal(path, "training.round=4").startswith("--set: unknown key")
    for wrong in ("rounds=4", "training.rounds", "training.=4", ".rounds=4", ""):
        assert "section.key=value" in refusal(path, wrong)
    assert refusal(path, "run.seed=1\nx = 2").startswith("--set: [run] seed")


def test_a_missing_file_is_told_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("")
    assert f"did you mean {tmp_path / 'demo.toml'}?" in refusal(tmp_path / "dmo.toml")
    assert "no settings file" in refusal(tmp_path / "nowhere" / "x.toml")
    assert "cannot read" in refusal(tmp_path)


def test_a_file_that_is_not_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe[\x00")
    assert "UTF-8" in refusal(tmp_path / "x.toml")


def test_a_run_can_be_asked_again_under_other_settings() -> None:
    longer = Config().with_overrides(["data.tokens=640", "evaluation.batch=2"])
    assert (longer.data.tokens, longer.evaluation.batch) == (640, 2)
    assert longer.training == Config().training
    with pytest.raises(SettingsError, match=r"^--set: unknown key"):
        Config().with_overrides(["data.token=640"])


def test_another_algorithm_or_task_leaves_the_section_of_the_one_before() -> None:
    sets = ["data.task=mmlu", "mmlu.shots=2", "evaluation.arms=[]", "federation.algorithm=fedprox", "fedprox.mu=0.5"]
    own = Config().with_overrides(sets)
    back = own.with_overrides(["data.task=needles", "federation.algorithm=fedala", "fedala.steps=3"])
    assert "mmlu" not in back.to_dict() and "fedprox" not in back.to_dict()
    assert back.to_dict()["fedala"]["steps"] == 3
    assert own.with_overrides(["data.task=mmlu", "run.seed=1"]).to_dict()["mmlu"]["shots"] == 2
    with pytest.raises(SettingsError, match=r"\[mmlu\] is set, but .* would not read it"):
        own.with_overrides(["data.task=needles", "mmlu.shots=3"])


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().training.rounds = 5  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Config().run = Config().run  # type: ignore[misc]


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=6), st.none() | st.integers() | st.text() | st.just({"a": 1}), min_size=1))
def test_a_table_of_anything_is_refused_and_nothing_else(table: dict[str, object]) -> None:
    assume(not set(table) & set(Config.model_fields))
    with pytest.raises(SettingsError):
        Config.from_dict(table)


@pytest.mark.parametrize(
    ("layers", "total", "numbers"),
    [
        ("all", 3, [0, 1, 2]),
        ("none", 3, []),
        ("last:2", 5, [3, 4]),
        ("last:5", 5, [0, 1, 2, 3, 4]),
        ("every:2", 6, [1, 3, 5]),
        ("every:3", 7, [2, 5]),
        ("every:1", 2, [0, 1]),
        ("2", 3, [2]),
        ("8,9,14-16", 30, [8, 9, 14, 15, 16]),
        ("4-5,0,5", 6, [0, 4, 5]),
    ],
)
def test_layers_are_counted_from_zero(layers: str, total: int, numbers: list[int]) -> None:
    assert MemoryConfig(layers=layers).layer_numbers(total) == numbers


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(SettingsError, match=r'layers = "last:31".* 30 layers'):
        MemoryConfig(layers="last:31").layer_numbers(30)
    with pytest.raises(SettingsError, match=r'layers = "8,30": the backbone has layers 0 to 29'):
        MemoryConfig(layers="8,30").layer_numbers(30)
    with pytest.raises(SettingsError, match="layers 0 to 29"):
        MemoryConfig(layers="0-999999999999").layer_numbers(30)
    with pytest.raises(ValidationError, match='"3,9-8" has a range that runs backwards'):
        MemoryConfig(layers="3,9-8")


def test_noise_that_draws_clients_does_not_go_with_a_stream_of_tasks() -> None:
    table = {
        "tasks": {"order": ["passkey", "name-date"], "rounds-per-task": 2},
        "training": {"rounds": 4},
        "combine": {"weights": "uniform"},
        "privacy": {"mode": "central"},
    }
    assert Config.from_dict(table).privacy.mode == "central"
    with pytest.raises(SettingsError, match="clients-per-round = 0"):
        Config.from_dict({**table, "federation": {"clients-per-round": 2}})


@pytest.mark.parametrize(
    ("memory", "lora", "message"),
    [
        ({"layers": "all"}, {}, r'\[memory\] layers = "all" layer 0 trains'),
        ({"layers": "8,0-2"}, {}, 'layers = "8,0-2" layer 0 trains'),
        ({"layers": "none"}, {}, 'layers = "none" no layer trains'),
        ({}, {"rank": 4}, r"\[lora\] rank = 4 trains in all layers"),
    ],
)
def test_a_prefix_is_not_kept_where_there_is_none(memory: dict[str, Any], lora: dict[str, Any], message: str) -> None:
    table: dict[str, Any] = {"prefix": {"cache": "memory"}, "memory": memory, "lora": lora}
    with pytest.raises(SettingsError, match=message):
        Config.from_dict(table)
    assert Config.from_dict({**table, "prefix": {"cache": "off"}}).prefix.limit_mb == 2000
    assert Config.from_dict({"prefix": {"cache": "disk"}, "memory": {"layers": "8,14-23"}}).prefix.cache == "disk"


@pytest.mark.parametrize(
    ("task", "key", "value", "remedy"),
    [
        ("mmlu", "imbalance", 10.0, "leave it out, or set task to needles or classification"),
        ("public", "imbalance", 10.0, "leave it out, or set task to needles or classification"),
        ("mmlu", "dirichlet-alpha", 0.5, "leave it out, or set task to needles"),
        ("public", "dirichlet-alpha", 0.5, "leave it out, or set task to needles"),
        ("classification", "shortest", 90, "leave it out, or set task to needles"),
        ("classification", "dirichlet-alpha", 0.5, "set classification.alpha instead, or set task to needles"),
    ],
)
def test_a_spread_that_the_task_does_not_read_is_refused(task: str, key: str, value: float, remedy: str) -> None:
    arms = {"evaluation": {"arms": []}}
    with pytest.raises(SettingsError) as caught:
        Config.from_dict({"data": {"task": task, key: value}, **arms})
    assert str(caught.value).endswith(f'[data] {key} = {value:g}, but data.task = "{task}" does not read it: {remedy}.')
    even = {"imbalance": 1.0, "dirichlet-alpha": 0.0, "shortest": 0}
    assert Config.from_dict({"data": {"task": task, **even}, **arms}).data.task == task


def test_a_shortest_prompt_above_the_longest_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"shortest = 300 is above tokens = 200: lower it, or set it to 0"):
        Config.from_dict({"data": {"tokens": 200, "shortest": 300}})


def test_what_tasks_read_of_unlike_examples_are_known_tasks_and_keys() -> None:
    from fednl.data.tasks import TASKS, UNEVEN, not_read

    assert UNEVEN.keys() <= TASKS.keys()
    known = set(not_read("a task of which nothing is said"))
    assert known == {"imbalance", "dirichlet-alpha", "shortest"}
    assert all(keys.keys() <= known for keys in UNEVEN.values())
