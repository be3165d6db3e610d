"""One TOML file becomes typed, frozen, strict settings.

Each section's class belongs to the package that uses it; this file composes them, so a wrong key or value is
told, with its remedy, before any model or data is loaded. An algorithm's own settings stand in a section
named after it. Importing this imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr

from fednl.config_check import Checker, hint_for, keys_of, named
from fednl.config_idle import check_idle
from fednl.config_lora import check_adapters, check_asked, check_demonstrated, check_lora
from fednl.config_preset import Made, expanded, parsed, without
from fednl.config_text import read_toml, toml_value
from fednl.data.settings import DataSettings
from fednl.data.stream import TasksSettings
from fednl.data.tasks import TASKS, check_kinds, check_stream, check_uneven, task_settings
from fednl.errors import SettingsError
from fednl.evaluation.measures import MEASURES
from fednl.evaluation.settings import EvaluationSettings
from fednl.federation.exchange import CombineSettings, Exchange, PrivacySettings, TrafficSettings, check_exchange
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.memory.settings import MemoryConfig, PrefixSettings, check_prefix
from fednl.models.settings import DEFAULT_LORA_RANK, BackboneSettings, ContextVectorSettings, LoraSettings
from fednl.section import Section, kebab


class RunSettings(Section):
    """The `[run]` section.

    Args:
        seed: where every random stream of the run comes from; at least 0.
        out: the folder in which a run's own folder is made.
    """

    seed: int = Field(default=0, ge=0)
    out: str = Field(default="runs", min_length=1)


# Whose own section is named after a setting's value: key, the setting's section, its default.
_OWN = {
    "algorithm": ("federation", str(FederationSettings().algorithm)),
    "task": ("data", DataSettings().task),
}


class Config(Section):
    """Everything one run depends on.

    Args:
        backbone: which frozen model.
        data: which task, which clients, how many examples.
        tasks: a stream of tasks, one after the other; by default none.
        memory: the memory attached to the backbone.
        prefix: what is kept of the frozen layers below the memory.
        lora: a low-rank adapter beside it; rank 0 is none.
        context_vectors: where context vectors are read, and with which weights injection begins.
        training: rounds, local steps, learning rate.
        federation: the algorithm, what is shared, who takes part.
        traffic: how updates are written on the wire.
        combine: how updates become one, and how far a client can move it.
        privacy: noise, masks, budget, and how few examples are too few to share.
        evaluation: how answers are scored, which arms are compared.
        run: seed and output folder.
        algorithm: the algorithm's own section, by kebab-case key; `method_settings` gives it typed.
        task: the task's own section, by kebab-case key; `task_settings` gives it typed.
    """

    backbone: BackboneSettings = Field(default_factory=BackboneSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    tasks: TasksSettings = Field(default_factory=TasksSettings)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    prefix: PrefixSettings = Field(default_factory=PrefixSettings)
    lora: LoraSettings = Field(default_factory=LoraSettings)
    context_vectors: ContextVectorSettings = Field(default_factory=ContextVectorSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    federation: FederationSettings = Field(default_factory=FederationSettings)
    traffic: TrafficSettings = Field(default_factory=TrafficSettings)
    combine: CombineSettings = Field(default_factory=CombineSettings)
    privacy: PrivacySettings = Field(default_factory=PrivacySettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    run: RunSettings = Field(default_factory=RunSettings)
    algorithm: dict[str, Any] = Field(default_factory=dict)
    task: dict[str, Any] = Field(default_factory=dict)
    _made: Made = PrivateAttr(default_factory=Made)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "settings", overridden: Sequence[str] = ()) -> Config:
        """Checks a table of sections with kebab-case keys, as TOML or a run's `config.json` gives it.

        Args:
            table: section name to (key to value); not modified.
            where: what an error names as the place, usually the file.
            overridden: the `section.key` names that came from `--set`; an error then names `--set` instead.

        Raises:
            SettingsError: a section or key is unknown, a value is not one it can have, sections do not fit together,
                or the algorithm and the LoRA do not.
        """
        from fednl.federation.algorithms import ALGORITHMS

        names = {"algorithm": tuple(ALGORITHMS), "task": tuple(TASKS)}
        others = {key: (section, names[key]) for key, (section, _) in _OWN.items()}
        check = Checker(where, frozenset(overridden), others)
        table, made = expanded(table, check)
        sections = {name: field.annotation for name, field in cls.model_fields.items() if name not in _OWN}
        own = {key: named(table, section, key, default) for key, (section, default) in _OWN.items()}
        kind_of_own = cls.method_class(own["algorithm"], f"{check.place('federation', 'algorithm')} ")
        check.sections(table, {kebab(name): keys_of(kind) for name, kind in sections.items()}, own)
        values: dict[str, Any] = {key: dict(table.get(name, {})) for key, name in own.items()}
        for name, kind in sections.items():
            values[name] = check.section(kebab(name), kind, table.get(kebab(name), {}))
        for key, kind in (("algorithm", kind_of_own), ("task", task_settings(own["task"]))):
            if kind is not None:
                checked = check.section(own[key], kind, values[key])
                values[key] = checked.model_dump(mode="json", by_alias=True, exclude_none=True)
        config = cls(**values)
        config._made = made
        _check_arms(config, check)
        if config.tasks.order and config.training.rounds != config.tasks.last_rounds[-1]:
            raise SettingsError(
                f"{where}: [tasks] order has {len(config.tasks.order)} tasks of {config.tasks.rounds_per_task} rounds, "
                f"but [training] rounds = {config.training.rounds}; set rounds = {config.tasks.last_rounds[-1]}."
            )
        algorithm = ALGORITHMS[own["algorithm"]](config.method_settings, config.federation.shared)
        arm_rank = config.lora.rank or DEFAULT_LORA_RANK if "federated-lora" in config.evaluation.arms else 0
        try:
            check_uneven(config.data)
            check_stream(config.tasks, config.data)
            check_adapters(config.federation, config.lora.rank, algorithm.traits)
            check_lora(algorithm, config.federation, config.training, config.lora.rank, arm_rank)
            check_exchange(config.exchange, config.federation, algorithm.traits)
            check_idle(config.federation, config.exchange, algorithm.traits.shares or arm_rank > 0)
            check_prefix(config.prefix, config.memory, config.lora.rank)
            if config.tasks.order and config.privacy.mode == "central" and config.federation.clients_per_round:
                raise SettingsError(
                    "[privacy] central noise draws clients by coins that they do not know, but a task of [tasks] ends "
                    "for a client with the last round that it expects: set [federation] clients-per-round = 0."
                )
        except SettingsError as error:
            raise SettingsError(f"{where}: {error}") from None
        return config

    @staticmethod
    def method_class(name: str, place: str = "") -> type[BaseModel]:
        """Gives the settings class of the algorithm `name`.

        Args:
            name: the algorithm, as `[federation] algorithm` names it.
            place: what an error says first.

        Raises:
            SettingsError: there is no such algorithm.
        """
        from fednl.federation.algorithms import ALGORITHMS, PRESETS

        if name not in ALGORITHMS:
            preset = f'it is a preset: write preset = "{name}" instead.' if name in PRESETS else ""
            hint = preset or hint_for(name, sorted(ALGORITHMS), "algorithms")
            raise SettingsError(f'{place}[federation] algorithm = "{name}" is unknown; {hint}')
        kind: type[BaseModel] = ALGORITHMS[name].Settings
        return kind

    @property
    def task_settings(self) -> BaseModel | None:
        """The task's own settings, checked and complete; None where it has none."""
        kind = task_settings(self.data.task)
        return None if kind is None else Checker("settings").section(self.data.task, kind, self.task)

    @property
    def exchange(self) -> Exchange:
        """How updates travel, become one and are hidden."""
        return Exchange(self.traffic, self.combine, self.privacy)

    @property
    def method_settings(self) -> BaseModel:
        """The algorithm's own settings, checked and complete."""
        name = self.federation.algorithm
        settings: BaseModel = Checker("settings").section(name, self.method_class(name), self.algorithm)
        return settings

    def check_training(self, where: str = "settings") -> None:
        """Checks what training needs beyond what answering does: trained rules may be asked another task's questions.

        Args:
            where: what an error names as the place.

        Raises:
            SettingsError: the algorithm cannot train on the task, or more clients are wanted than train.
        """
        from fednl.federation.algorithms import ALGORITHMS

        try:
            check_kinds(self.data, bool(self.tasks.order))
            check_asked(self.federation, self.data.clients - len(set(self.data.hold_out_clients)))
            check_demonstrated(self.federation, self.data.task, ALGORITHMS[self.federation.algorithm].traits)
        except SettingsError as error:
            raise SettingsError(f"{where}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Gives every section with every key, defaults filled in; a value that is not set has no key."""
        table: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=set(_OWN))
        own = {self.federation.algorithm: self.method_settings, self.data.task: self.task_settings}
        told = {
            name: kind.model_dump(mode="json", by_alias=True, exclude_none=True) for name, kind in own.items() if kind
        }
        return table | {name: keys for name, keys in told.items() if keys}

    def to_json(self) -> str:
        """Gives `to_dict` as JSON, one key a line."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def to_toml(self) -> str:
        """Gives `to_dict` as a settings file that `load_config` reads back to an equal Config."""
        return "\n".join(
            f"[{section}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in keys.items())
            for section, keys in self.to_dict().items()
        )

    def with_overrides(self, overrides: Sequence[str]) -> Config:
        """Gives these settings with some replaced, each `"section.key=value"` as for `load_config`.

        Another algorithm or task leaves the section of the one before behind; its own has defaults. So does another
        preset with what the one before had set.

        Raises:
            SettingsError: an override is not readable, or its key or value is wrong.
        """
        table = without(self.to_dict(), self._made, overrides)
        after = {(section, key): value for section, key, value in parsed(overrides)}
        for key, (section, _) in _OWN.items():
            name = getattr(getattr(self, section), key)
            if after.get((section, key), name) != name:
                table.pop(name, None)
        config = _overridden(table, "settings", overrides)
        config._made = config._made if config._made.preset else self._made
        return config

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved settings, hexadecimal; where the run is written does not change it."""
        table = self.to_dict()
        table["run"] = {key: value for key, value in table["run"].items() if key != "out"}
        text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Reads a settings file and checks every key and value in it.

    Args:
        path: a TOML file; what it leaves out has its default.
        overrides: `"section.key=value"` each, in TOML's way of writing values; quotes around a word may be
            left out. They win over the file.

    Raises:
        SettingsError: the file is missing or not TOML, or a key or value is wrong.

    Example:
        `load_config("configs/demo.toml", ["training.rounds=2", "run.seed=1"])`
    """
    config = _overridden(read_toml(Path(path)), str(path), overrides)
    config.check_training(str(path))
    return config


def _overridden(table: dict[str, Any], where: str, overrides: Sequence[str]) -> Config:
    overridden = []
    for section, key, value in parsed(overrides):
        keys = table.setdefault(section, {})
        if not isinstance(keys, dict):
            raise SettingsError(f"{where}: {section} must be a section: write [{section}] above its keys.")
        keys[key] = value
        overridden.append(f"{section}.{key}")
    return Config.from_dict(table, where, overridden)


def _check_arms(config: Config, check: Checker) -> None:
    """Every arm must be one that the task's comparison has."""
    known = MEASURES[config.data.task].arms
    for arm in config.evaluation.arms:
        if arm not in known:
            raise SettingsError(
                f'{check.place("evaluation", "arms")} [evaluation] arms names "{arm}", which data.task = '
                f'"{config.data.task}" does not have; its arms are: {", ".join(known)}.'
            )
