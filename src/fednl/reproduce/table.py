"""What a reproduced table is made of: scales, methods, lines, and the numbers a paper prints. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.reproduce.sitting import Sitting


@dataclass(frozen=True)
class Method:
    """One run of a table, in a folder of its own.

    Attributes:
        name: the folder's name.
        sets: what makes it this method, `"section.key=value"` each; the command line does not replace it.
        usual: its further settings over those of the scale, which the command line replaces.
    """

    name: str
    sets: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """One line of a table: how a run's rules answer.

    Attributes:
        name: what the table calls it.
        method: whose run it is read from.
        arm: how that run answers, a name in `fednl.arms.VIEWS`.
        published: the line of the paper's table beside which it stands; empty where there is none.
    """

    name: str
    method: Method
    arm: str = "federated"
    published: str = ""


@dataclass(frozen=True)
class Published:
    """A table as a paper prints it. These numbers are never computed with.

    Attributes:
        what: what its numbers are, with their unit.
        source: which paper and table.
        model: its backbone; or that it is not stated.
        columns: the paper's columns; the last one stands beside our numbers.
        rows: line -> a number for each column; None where the paper has none.
        heading: what that column is called beside our numbers.
        notes: what has to be known to read them.
    """

    what: str
    source: str
    model: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float | None, ...]]
    heading: str = "average"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """One size of a reproduction.

    Attributes:
        about: what it takes: model, time, memory.
        sets: the settings of all its runs, `"section.key=value"` each.
        lengths: prompt tokens that are measured, where a table has lengths; else empty.
        facts: how many facts a prompt hides, where a table hides any; else empty.
        own: by the name of a method, what it sets at this scale over its own settings.
    """

    about: str
    sets: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    facts: tuple[int, ...] = ()
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, method: Method) -> tuple[str, ...]:
        """All settings of a method's run at this scale; a later one wins."""
        return (*self.sets, *self.beside(method))

    def beside(self, method: Method) -> tuple[str, ...]:
        """What a method sets over the scale's own settings."""
        return (*method.usual, *method.sets, *self.own.get(method.name, ()))


@dataclass(frozen=True)
class Page:
    """A table as far as it is measured.

    Attributes:
        text: Markdown.
        measured: rows of numbers measured here, by the name of their results file.
    """

    text: str
    measured: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table that can be made again.

    Attributes:
        name: as the command line calls it.
        about: one sentence.
        scales: by name, those of `fednl.reproduce.SCALES` that it has.
        lines: its lines at a scale.
        work: does what is missing, and gives the table as it stands after every step; the last one is whole.
        asks_others: whether at lengths or numbers of facts that are asked for, runs answer under other settings than
            their own (`Asked.changed`), how many questions among them.
    """

    name: str
    about: str
    scales: Mapping[str, Scale]
    lines: Callable[[str], Sequence[Line]]
    work: Callable[[Sitting], Iterator[Page]]
    asks_others: bool = False
