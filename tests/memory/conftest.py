"""What the tests of the memory share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["token", "context"])
def both_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with either kind of keys: what the memory promises holds for both."""
    monkeypatch.setattr("memory.models.KEYS", request.param)
    keys: str = request.param
    return keys
