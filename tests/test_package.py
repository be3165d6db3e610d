"""What a newcomer meets: the README's commands, the licence, the pins, the version."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fednl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGES = ["README.md", "CONTRIBUTING.md"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def shell_lines() -> list[tuple[str, str]]:
    """Every command in a fenced shell block of the pages, comments cut off."""
    lines = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL):
            lines += [(page, line.split("#")[0].strip()) for line in block.splitlines() if line.split("#")[0].strip()]
    return lines


def test_there_are_commands_to_check() -> None:
    commands = {command for _, command in shell_lines()}
    assert {"make demo", "make test"} <= commands
    assert any(command.startswith("fednl train") for command in commands)


@pytest.mark.parametrize(("page", "command"), shell_lines(), ids=lambda value: str(value))
def test_every_command_of_a_page_exists(page: str, command: str) -> None:
    words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
    program = words[0]
    if program == "make":
        assert set(words[1:]) <= TARGETS
    elif Path(program).name == "fednl":
        verb = words[1:3] if words[1] == "models" else words[1:2]
        options = [word for word in words if word.startswith("--")]
        code = f"from fednl.cli import main; main({[*verb, '--help']!r})"
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert all(re.search(rf"^ +{re.escape(option)}\b", shown, re.MULTILINE) for option in options)
        for word in words:
            assert not word.endswith(".toml") or not word.startswith("configs/") or (ROOT / word).is_file()
    else:
        assert program in {"git", "cd", "pip", "python"}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_the_version_is_one() -> None:
    import importlib.metadata

    assert importlib.metadata.version("fednl") == fednl.__version__
    assert f"## {fednl.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_package_is_typed_and_licensed() -> None:
    assert (ROOT / "src/fednl/py.typed").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")[:200]
    assert PROJECT["license"] == "Apache-2.0"


def test_pins_lie_within_the_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert not any("+" in version for version in pins.values())
    extras = PROJECT["optional-dependencies"]
    needs = list(map(Requirement, [*PROJECT["dependencies"], *extras["dev"]]))
    for own in [need for need in needs if need.name == "fednl"]:
        needs.remove(own)
        needs += [Requirement(need) for extra in own.extras for need in extras[extra]]
    for need in needs:
        assert need.specifier.contains(pins[need.name], prereleases=True), need


def test_make_extras_tries_every_extra() -> None:
    found = re.search(r"^EXTRAS := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found and set(found[1].split(",")) == set(PROJECT["optional-dependencies"])


def test_the_paper_map_names_what_exists() -> None:
    folder = Path()
    for line in (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            folder = Path()
        elif head := re.search(r"here \(`([a-z/]+)`\)", line):
            folder = Path(head[1])
        for name, member in re.findall(r"`([\w/.-]+\.py)(?::(?:\w+\.)?(\w+))?`", line):
            places = [ROOT / name, ROOT / "src/fednl" / name, ROOT / "src/fednl" / folder / name]
            code = [place.read_text(encoding="utf-8") for place in places if place.is_file()]
            assert code and (not member or re.search(rf"\b{member}\b", code[-1])), f"{name}:{member}"


def test_the_core_stays_beside_flower() -> None:
    # Flower 1.42's own ranges; `make extras` resolves them for real.
    ceilings = {"typer": "0.21", "rich": "15", "click": "9", "packaging": "26"}
    needs = {need.name: need for need in map(Requirement, PROJECT["dependencies"])}
    for name, ceiling in ceilings.items():
        assert not needs[name].specifier.contains(ceiling), name


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = set(re.findall(r"\((\d{4}-[a-z-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in folder.glob("0*.md")}
