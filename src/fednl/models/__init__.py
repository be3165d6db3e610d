"""The frozen backbone and what is trained on it; names load on first use, so importing this is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednl.models.adapters import ADAPTERS as ADAPTERS
    from fednl.models.adapters import Adapter as Adapter
    from fednl.models.adapters import LoraAdapter as LoraAdapter
    from fednl.models.adapters import MemoryAdapter as MemoryAdapter
    from fednl.models.backbone import Backbone as Backbone
    from fednl.models.backbone import load_backbone as load_backbone
    from fednl.models.lora import attach_lora as attach_lora
    from fednl.models.lora import detach_lora as detach_lora
    from fednl.models.lora import lora_params as lora_params
    from fednl.models.lora import set_lora as set_lora
    from fednl.models.packaged import PACKAGED as PACKAGED
    from fednl.models.packaged import fetch_packaged as fetch_packaged
    from fednl.models.settings import BackboneSettings as BackboneSettings
    from fednl.models.settings import LoraSettings as LoraSettings

_FILE_OF = {
    "ADAPTERS": "adapters",
    "Adapter": "adapters",
    "Backbone": "backbone",
    "BackboneSettings": "settings",
    "LoraAdapter": "adapters",
    "LoraSettings": "settings",
    "MemoryAdapter": "adapters",
    "PACKAGED": "packaged",
    "attach_lora": "lora",
    "detach_lora": "lora",
    "fetch_packaged": "packaged",
    "load_backbone": "backbone",
    "lora_params": "lora",
    "set_lora": "lora",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_FILE_OF)
