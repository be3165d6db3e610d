"""What every section of a settings file is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


def kebab(name: str) -> str:
    """A field's name as its key in a settings file."""
    return name.replace("_", "-")


class Section(BaseModel):
    """A section of a settings file: frozen, strict, unknown keys refused, keys in kebab-case."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=kebab,
        validate_by_name=True,
        validate_by_alias=True,
    )
