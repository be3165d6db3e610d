"""One command's work on a table: runs are made, gone on with, or left as they are; nothing is done twice."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednl.config import Config
from fednl.config_text import parse_override, toml_value
from fednl.errors import SettingsError
from fednl.evaluation.outcomes import Outcome
from fednl.files import writing
from fednl.reproduce.given import ONLY_ASKED, check_given, key_of, path_told, reaching, without_folders
from fednl.reproduce.keeping import OnEvent, answers, numbers_shared, run_at
from fednl.reproduce.table import Line, Method, Page, Scale, Table
from fednl.reproduce.tiny import tiny_settings
from fednl.runs import Run


@dataclass(frozen=True)
class Sitting:
    """A table at one scale, in one folder.

    Attributes:
        table: the table.
        scale: a name in its scales.
        out: the folder of all its runs; the same folder goes on.
        given: settings from the command line; they win over all others but those that make a method what it is.
        asked_lengths: prompt tokens to measure in place of the scale's; empty for the scale's.
        asked_facts: how many facts a prompt hides, in place of the scale's; empty for the scale's.
        on_event: is told what happens.
    """

    table: Table
    scale: str
    out: Path
    given: Sequence[str] = ()
    asked_lengths: Sequence[int] = ()
    asked_facts: Sequence[int] = ()
    on_event: OnEvent = field(default=lambda event: None)

    @property
    def size(self) -> Scale:
        """The scale's own settings."""
        return self.table.scales[self.scale]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The prompt lengths to measure, in tokens."""
        return tuple(self.asked_lengths) or self.size.lengths

    def config(self, method: Method) -> Config:
        """The settings of a method's run: the scale's, the method's own, then those from the command line.

        What makes the method what it is stays (`Method.sets`). Where other lengths or facts are asked for under
        settings of their own (`Table.asks_others`), how many questions are asked is not the run's: runs that are there
        answer as many, whatever number they were made with, and further ones are made with the same.

        Raises:
            SettingsError: a setting is wrong.
        """
        folder = self.out / "tiny-model"
        table = tiny_settings(folder) if self.scale == "tiny" else {}
        sets = [one.replace("{folder}", str(folder)) for one in self.size.of(method)]
        other = self.table.asks_others and (self.asked_lengths or self.asked_facts)
        asks = [one for one in self.given if other and key_of(one) in ONLY_ASKED]
        given = [one for one in self.given if one not in asks]
        kept = self._kept(method, asks) if asks else []
        return Config.from_dict(table).with_overrides([*sets, *reaching([*given, *kept], method)])

    def _kept(self, method: Method, asks: Sequence[str]) -> list[str]:
        """Those settings as the method's run has them, or another run of the folder where it is not made yet."""
        runs = [Run(self.out / name) for name in dict.fromkeys([method.name, *(one.name for one in self.methods)])]
        made = next((run.read_json("config.json") for run in runs if (run.path / "config.json").exists()), {})
        keys = [parse_override(one)[:2] for one in asks]
        return [
            f"{section}.{key}={toml_value(made[section][key])}" for section, key in keys if key in made.get(section, {})
        ]

    def run(self, method: Method) -> Run:
        """The run of a method with its rounds done and its own arms measured."""
        return run_at(self.out / method.name, self.config(method), self._telling(method))

    def answers(self, method: Method, arms: Sequence[str], changed: Sequence[str] = ()) -> dict[str, list[Outcome]]:
        """How a method's run answers, by arm; it is made or gone on with first, and what is missing is measured.

        Args:
            method: the method.
            arms: names in `fednl.arms.VIEWS`.
            changed: settings under which it answers, where they are not the run's own, as for `fednl eval --set`.

        Raises:
            SettingsError: there are no questions.
        """
        if not self.config(method).with_overrides(changed).data.test:
            raise SettingsError(
                f"[data] test = 0, but the table {self.table.name} is made of answers to test questions: set it to 1 "
                "or more."
            )
        return answers(self.run(method), arms, changed, self._telling(method))

    def numbers_shared(self, lines: Sequence[Line]) -> dict[Method, int | None]:
        """Counts, for every method of some lines, the numbers of its rules that a client shares in a round."""
        methods = dict.fromkeys(line.method for line in lines)
        return {method: numbers_shared(Run(self.out / method.name)) for method in methods}

    @property
    def command(self) -> str:
        """The command line that does this, and goes on with it, without the user's own folders."""
        numbers = (("--lengths", self.asked_lengths), ("--facts", self.asked_facts))
        asked = [word for option, own in numbers if own for word in (option, ",".join(map(str, own)))]
        sets = [word for one in self.given for word in ("--set", without_folders(one))]
        out = ["--out", path_told(self.out)]
        words = ["fednl", "reproduce", self.table.name, "--scale", self.scale, *asked, *sets, *out]
        return shlex.join(words)

    @property
    def methods(self) -> tuple[Method, ...]:
        """Whose runs the table is made of."""
        return tuple(dict.fromkeys(line.method for line in self.table.lines(self.scale)))

    def whole(self) -> Page:
        """Does what is missing, writes the table after every step, and gives the whole one.

        Raises:
            SettingsError: the folder is a file or itself a run's, a run in it has other settings, or what was given is
                wrong or would give a run another's name.
            FednlError: the folder cannot be made, or as `fednl.training.train`, `resume` and `evaluate`.
            Interrupted: Ctrl-C; the same goes on.
        """
        if self.out.exists() and not self.out.is_dir():
            raise SettingsError(f"--out {self.out} is a file: name a folder, for a table's runs and report.")
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        if (self.out / "config.json").exists():
            raise SettingsError(
                f"--out {self.out} is the folder of a run: name another, for a table's runs and report."
            )
        check_given(self.given, self.table, {method: self.config(method) for method in self.methods})
        page = Page("")
        for page in self.table.work(self):
            self.write(page)
        return page

    def note(self, text: str) -> None:
        """Tells a person something in one line."""
        self.on_event({"event": "note", "text": text})

    def _telling(self, method: Method) -> OnEvent:
        """The same events, with the method's name in the names of their phases."""

        def tell(event: Mapping[str, Any]) -> None:
            named = {"name": f"{method.name}: {event['name']}"} if event["event"] == "phase" else {}
            self.on_event({**event, **named})

        return tell

    def write(self, page: Page) -> Path:
        """Writes the table as it stands: `report.md`, and `results/NAME.json` for what was measured.

        Other lengths or facts than the scale's have a report of their own, so that neither command undoes the other's.
        """
        folder = Run(self.out)
        facts = {"table": self.table.name, "scale": self.scale, "where": "measured here", "command": self.command}
        for name, rows in page.measured.items():
            folder.write_json(f"results/{name}.json", {**facts, "rows": list(rows)})
        parts = ["report", *self.asked_lengths, *(["facts", *self.asked_facts] if self.asked_facts else [])]
        return folder.write_text("-".join(map(str, parts)) + ".md", page.text)
