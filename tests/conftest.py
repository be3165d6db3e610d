"""What holds for every test: one thread, no network, nothing of the hub."""

from __future__ import annotations

import os

# Before torch or a tokenizer is imported: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings


class NetworkRefused(RuntimeError):
    """A test tried to reach another machine."""


def _is_this_machine(host: object) -> bool:
    if host in (None, "", "localhost", b"localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


def _guard(call: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family != getattr(socket, "AF_UNIX", None) and not _is_this_machine(address[0]):
            raise NetworkRefused(f"a test tried to connect to {address[0]}")
        return call(self, address)

    return guarded


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    find = socket.getaddrinfo

    def guarded_find(host: Any, *rest: Any, **named: Any) -> Any:
        if not _is_this_machine(host):
            raise NetworkRefused(f"a test tried to look up {host}")
        return find(host, *rest, **named)

    patch = pytest.MonkeyPatch()
    patch.setattr(socket, "getaddrinfo", guarded_find)
    patch.setattr(socket.socket, "connect", _guard(socket.socket.connect))
    patch.setattr(socket.socket, "connect_ex", _guard(socket.socket.connect_ex))
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


# A busy machine's slow example is no finding; the same examples every time let a red run be repeated.
settings.register_profile("fednl", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fednl")
