"""Rounds of training over many clients: pure torch and dicts. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.federation.algorithms import ALGORITHMS as ALGORITHMS
    from fednl.federation.algorithms import PRESETS as PRESETS
    from fednl.federation.exchange import Exchange as Exchange
    from fednl.federation.local import LocalPlan as LocalPlan
    from fednl.federation.local import Problem as Problem
    from fednl.federation.local import train_locally as train_locally
    from fednl.federation.loop import run_rounds as run_rounds
    from fednl.federation.message import Message as Message
    from fednl.federation.params import ClientState as ClientState
    from fednl.federation.params import Params as Params
    from fednl.federation.settings import FederationSettings as FederationSettings
    from fednl.federation.settings import TrainingSettings as TrainingSettings
    from fednl.federation.sharing import take_part as take_part
    from fednl.federation.transport import InProcessTransport as InProcessTransport
    from fednl.federation.transport import Reply as Reply
    from fednl.federation.transport import Transport as Transport
    from fednl.federation.workers import ProcessTransport as ProcessTransport
    from fednl.federation.workers import WorkerPool as WorkerPool

_FILE_OF = {
    "ALGORITHMS": "algorithms",
    "ClientState": "params",
    "Exchange": "exchange",
    "FederationSettings": "settings",
    "InProcessTransport": "transport",
    "LocalPlan": "local",
    "Message": "message",
    "PRESETS": "algorithms",
    "Params": "params",
    "Problem": "local",
    "ProcessTransport": "workers",
    "Reply": "transport",
    "TrainingSettings": "settings",
    "Transport": "transport",
    "WorkerPool": "workers",
    "run_rounds": "loop",
    "take_part": "sharing",
    "train_locally": "local",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_FILE_OF)
