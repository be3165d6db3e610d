"""Prints constraints.txt for the environment this runs in: what the core and the dev extra need, pinned.

Usage: .venv/bin/python tools/pins.py > constraints.txt
"""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEAD = """\
# The versions the tests pass with (Python 3.11). `make` installs exactly these; a plain `pip install fednl` takes
# the ranges of pyproject.toml. Made by tools/pins.py from a tested environment.
"""


def closure(root: str, extras: tuple[str, ...]) -> dict[str, str]:
    """Every distribution that `root[extras]` needs here, with its version; `root` itself is left out."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(root, extra) for extra in ("", *extras)]
    while queue:
        name, extra = queue.pop()
        key = (canonicalize_name(name), extra)
        if key in seen:
            continue
        seen.add(key)
        found = importlib.metadata.distribution(name)
        # A local suffix such as +cpu names one build, not a version.
        pins[key[0]] = Version(found.version).public
        for text in found.requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                queue += [(need.name, more) for more in ("", *need.extras)]
    del pins[canonicalize_name(root)]
    return pins


if __name__ == "__main__":
    print(HEAD + "\n".join(f"{name}=={version}" for name, version in sorted(closure("fednl", ("dev",)).items())))
