"""What can be trained on a backbone, each kind behind the same calls; a new kind is a class and a line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from fednl.errors import BackboneError
from fednl.models.settings import ContextVectorSettings, LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fednl.memory.settings import MemoryConfig


Demonstrations: TypeAlias = Mapping[str, Tensor]
"""`input_ids` and `attention_mask` `[batch, tokens]`, right-padded, and `last`, `label` and `separator` `[batch]`: the
last token of each row's prompt, of its answer, and of the line break after it (`fednl.data.batches.demonstrations`)."""


class Adapter(ABC):
    """Trainable parameters on one frozen model, by canonical name.

    An object serves one model at a time. Adapters of different kinds go onto one model in any order and come
    off in any order; each leaves the other's parameters trainable.
    """

    kind: str

    def __init__(self) -> None:
        self._model: PreTrainedModel | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model this adapter sits on.

        Raises:
            BackboneError: it sits on none.
        """
        if self._model is None:
            raise BackboneError(f"the {self.kind} adapter is not attached to a model; call attach first.")
        return self._model

    @abstractmethod
    def attach(self, model: PreTrainedModel, settings: Any, seed: int) -> PreTrainedModel:
        """Puts the adapter into a model, in place, and returns the same model.

        Args:
            model: the frozen backbone.
            settings: the adapter's own section.
            seed: draws the initial values.

        Raises:
            BackboneError, SettingsError: the model or the settings do not allow it.
        """

    @abstractmethod
    def detach(self) -> PreTrainedModel:
        """Takes the adapter out and returns the model as it was."""

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """Gives the live parameters by canonical name; an optimiser may change them in place."""

    def collect(self, batches: Iterable[Demonstrations], noise: torch.Generator) -> dict[str, Tensor]:
        """Gives what the adapter reads off a client's examples without training, by the names of its parameters.

        Most adapters read nothing.

        Args:
            batches: the client's training examples with their answers.
            noise: draws what the settings add.

        Raises:
            NonFiniteError: the backbone comes to NaN or infinity on them.
        """
        return {}

    def names(self) -> list[str]:
        """Gives the canonical names, in a fixed order."""
        return list(self.parameters())

    def get(self) -> dict[str, Tensor]:
        """Gives copies of the values; what happens to them does not reach the model."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters().items()}

    def set(self, params: Mapping[str, Tensor]) -> None:
        """Copies values into the live parameters, which keep their precision.

        Raises:
            CheckpointError: a name is missing or unknown, or a shape differs; then nothing is changed.
        """
        from fednl.memory.rules_file import assign

        assign(self.parameters(), params, f"the {self.kind} adapter's values")


class MemoryAdapter(Adapter):
    """The memory's rules: write strength, gate, projection, address."""

    kind = "memory"

    def attach(self, model: PreTrainedModel, settings: MemoryConfig, seed: int) -> PreTrainedModel:
        """Attaches memory; a LoRA that is there already stays trainable."""
        from fednl.memory.attach import attach_memory

        self._model = attach_memory(model, settings, seed=seed)
        return model

    def detach(self) -> PreTrainedModel:
        """Detaches memory."""
        from fednl.memory.attach import detach_memory

        model = detach_memory(self.model)
        self._model = None
        return model

    def parameters(self) -> dict[str, nn.Parameter]:
        """Gives the live rules."""
        from fednl.memory.attach import rules

        return rules(self.model)


class LoraAdapter(Adapter):
    """Low-rank updates of the backbone's projections; they move the static path."""

    kind = "lora"

    def attach(self, model: PreTrainedModel, settings: LoraSettings, seed: int) -> PreTrainedModel:
        """Attaches LoRA; a memory that is there already keeps its rules trainable."""
        from fednl.models.lora import attach_lora

        self._model = attach_lora(model, settings, seed)
        return model

    def detach(self) -> PreTrainedModel:
        """Detaches LoRA."""
        from fednl.models.lora import detach_lora

        model = detach_lora(self.model)
        self._model = None
        return model

    def parameters(self) -> dict[str, nn.Parameter]:
        """Gives the live LoRA factors."""
        from fednl.models.lora import lora_params

        return lora_params(self.model)


class ContextVectorsAdapter(Adapter):
    """Context vectors and the coefficients that inject them."""

    kind = "context-vectors"

    def attach(self, model: PreTrainedModel, settings: ContextVectorSettings, seed: int) -> PreTrainedModel:
        """Attaches the hooks; a memory or a LoRA that is there already stays trainable."""
        from fednl.models.context_vectors import attach_context

        self._model, self._settings = attach_context(model, settings), settings
        return model

    def detach(self) -> PreTrainedModel:
        """Takes the hooks off."""
        from fednl.models.context_vectors import detach_context

        model = detach_context(self.model)
        self._model = None
        return model

    def parameters(self) -> dict[str, nn.Parameter]:
        """Gives the live coefficients, which train, and vectors, which do not."""
        from fednl.models.context_vectors import context_params

        return context_params(self.model)

    def collect(self, batches: Iterable[Demonstrations], noise: torch.Generator) -> dict[str, Tensor]:
        """Gives the client's context vectors: the mean over its examples, with noise if set."""
        from fednl.models.context_injection import VECTORS
        from fednl.models.context_vectors import mean_outputs

        return {VECTORS: mean_outputs(self.model, batches, self._settings, noise)}


# A new adapter is one file or class and one line here.
ADAPTERS: dict[str, type[Adapter]] = {
    adapter.kind: adapter for adapter in (MemoryAdapter, LoraAdapter, ContextVectorsAdapter)
}
