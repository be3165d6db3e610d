"""The papers' tables, made again: every method an ordinary run, our numbers beside the published ones.

A table is one file here and one line in `TABLES`. Importing this imports neither torch nor a table.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fednl.errors import SettingsError

if TYPE_CHECKING:
    from fednl.reproduce.table import Table

# A new table is one file and one line here: where its `Table` stands.
TABLES: dict[str, str] = {
    "mmlu": "fednl.reproduce.mmlu:TABLE",
    "needles": "fednl.reproduce.needles:TABLE",
    "unseen": "fednl.reproduce.unseen:TABLE",
    "traffic": "fednl.reproduce.traffic:TABLE",
    "ifed-icl": "fednl.reproduce.ifed_icl:TABLE",
    "streaming": "fednl.reproduce.streaming:TABLE",
    "ablation": "fednl.reproduce.ablation:TABLE",
}

SCALES: dict[str, str] = {
    "tiny": "a random model of two layers, in seconds: shows that every part works, and no number means anything",
    "small": "SmolLM2-135M on a laptop's processor",
    "paper": "the paper's backbones and counts, on GPUs",
}
"""The sizes of a reproduction, with what each is for."""


def table_named(name: str) -> Table:
    """Finds a table.

    Args:
        name: a key of `TABLES`.

    Raises:
        SettingsError: there is no such table; the sentence lists those there are.
    """
    if name not in TABLES:
        raise SettingsError(f'there is no table "{name}" to reproduce; the tables are: {", ".join(TABLES)}.')
    module, attribute = TABLES[name].split(":")
    found: Table = getattr(import_module(module), attribute)
    return found


def check_scale(name: str, table: Table) -> None:
    """Refuses a scale that there is not.

    Raises:
        SettingsError: lists those there are.
    """
    if name not in table.scales:
        raise SettingsError(f'--scale "{name}" is unknown; the scales of {table.name} are: {", ".join(table.scales)}.')
