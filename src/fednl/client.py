"""One client: params in, params out, over one frozen backbone; in this process or in a worker process.

A `Bench` is what a process holds: the backbone, every client's private data, and one setup at a time (bare, window,
the run's own adapters, LoRA). Its operations take and give tensors and numbers only; text never leaves it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fednl.answering import answer, with_their_rules
from fednl.arms import (
    POOLED,
    TRAINED,
    VIEWS,
    Setup,
    adapters_hash,
    adapters_of,
    exchange_of,
    make_algorithm,
    training_of,
)
from fednl.config import Config
from fednl.data import Splits, Stream, collate, demonstrations, partition_rows
from fednl.data.partition import question_digest
from fednl.errors import BackboneError, MessageError, NonFiniteError
from fednl.evaluation.outcomes import Outcome
from fednl.federation.frames import OnProgress
from fednl.federation.local import LocalPlan
from fednl.federation.loop import sample_clients
from fednl.federation.lora_ranks import padded
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params
from fednl.federation.sharing import take_part
from fednl.holdings import held
from fednl.memory import MemoryCache
from fednl.memory.prefix import Kept, PrefixCache
from fednl.memory.rules_file import assign, backbone_identity
from fednl.memory.sites import is_attached, is_recurrent
from fednl.models import ADAPTERS, load_backbone
from fednl.models.adapters import Adapter
from fednl.models.context_store import TaskKey
from fednl.models.context_vectors import keep_prompts
from fednl.models.recurrent import RecurrentCache
from fednl.problem import IGNORED, ClientProblem, answer_nats
from fednl.seeding import torch_rng
from fednl.start_rules import load_start


class Bench:
    """One backbone, every client's data, one setup at a time.

    Args:
        config: the run's settings.
        note: is told in one line about a download, a conversion, or what of the data is left out.

    Raises:
        FednlError: the backbone, the data or the start rules cannot be used as set.
    """

    def __init__(self, config: Config, note: Callable[[str], None] | None = None) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.backbone = load_backbone(config.backbone, note)
        self.model = self.backbone.model
        try:
            self.identity = backbone_identity(self.model)
        except BackboneError as error:
            raise BackboneError(f'backbone.id = "{config.backbone.id}": {error}') from None
        self.data: dict[str, Splits[Any]] = held(config, self.backbone.tokenizer, note)
        self.stream = Stream(config.tasks, tuple(self.data)) if config.tasks.order else None
        self._setup: Setup | None = "bare"
        self._adapters: list[Adapter] = []
        self._start: dict[Setup, Params] = {}
        self._prefix: PrefixCache | None = None
        self._kept: Kept | None = None

    @property
    def candidates(self) -> int:
        """How many answers a question offers, the same for all; 4 where there is no question."""
        asked = (one for splits in self.data.values() for some in vars(splits).values() for one in some)
        first = next(asked, None)
        return len(first.candidate_ids) if first else 4

    def task_key(self) -> TaskKey:
        """What context vectors of this run's task belong to."""
        own = self.config.task_settings
        settings = {} if own is None else own.model_dump(mode="json", by_alias=True)
        vocabulary = json.dumps(self.backbone.tokenizer.get_vocab(), sort_keys=True)
        template = {name: settings.pop(name, None) for name in ("template", "labels")}
        name = self.config.data.task
        texts = str(settings.get("source", name))
        place = Path(texts).expanduser()  # one file under two names is one
        rows = [[row.client, row.split, row.n, row.sha256] for row in partition_rows(self.data)]
        return TaskKey(
            task=json.dumps([name, settings]),
            texts=str(place.resolve()) if place.exists() else texts,
            data=hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
            backbone=json.dumps(self.backbone.identity),
            tokenizer=hashlib.sha256(vocabulary.encode()).hexdigest(),
            template=json.dumps(template),
            layers=int(self.backbone.identity["layers"]),
            dtype=str(self.model.dtype),
            position=self.config.context_vectors.position,
            inject=self.config.context_vectors.inject,
        )

    @property
    def _mounted(self) -> Setup:
        assert self._setup is not None, "mount before anything is asked of the model"
        return self._setup

    @property
    def _injects(self) -> bool:
        """Whether something other than memory changes what the layers below it give."""
        return any(adapter.kind == "context-vectors" for adapter in self._adapters)

    def train_examples(self, client: str, round: int) -> Sequence[Any]:
        """A client's training examples in a round; the pooled learner's are everybody's."""
        holders = list(self.data) if client == POOLED else [client]
        found = [example for holder in holders for example in self.data[holder].train]
        if self.stream is None:
            return found
        now = {holder: self.stream.at(holder, round) for holder in holders}
        return [example for example in found if example.task == now[example.client]]

    def tasks_in(self, client: str, round: int, attempt: int = 0) -> tuple[str, str, bool]:
        """A client's task in a round of a stream, the same again where it ends with it, and whether for certain."""
        if self.stream is None or client == POOLED:
            return "", "", False
        number, seed = self.config.federation.clients_per_round, self.config.run.seed
        names = [name for name in self.data if name not in self.config.data.hold_out_clients]
        ends = self.stream.ends(client, round, lambda later: sample_clients(names, number, seed, later, attempt))
        return self.stream.at(client, round), ends, round in self.config.tasks.last_rounds

    def collated(self, examples: Sequence[Any], join: Callable[..., dict[str, Tensor]] = collate) -> dict[str, Tensor]:
        """Examples as a batch on the backbone's device, joined by `collate` or `demonstrations`."""
        pad = int(self.backbone.tokenizer.pad_token_id)
        return {name: t.to(self.model.device) for name, t in join(examples, pad).items()}

    def collect(self, client: str, round: int) -> Params:
        """What the mounted adapters read off a client's training examples of a round, without training.

        They read under the start rules, whatever the model met last; what they read is on the CPU, as messages are.
        """
        self.put(self._start[self._mounted])
        # As many rows as a training step: in bfloat16 every other shape of a batch costs seconds to prepare.
        examples, size = self.train_examples(client, round), self.config.training.batch
        noise = torch_rng(self.config.run.seed, "context/noise", client)
        collected: Params = {}
        for adapter in self._adapters:
            batches = (
                self.collated(examples[first : first + size], demonstrations) for first in range(0, len(examples), size)
            )
            collected |= {name: tensor.cpu() for name, tensor in adapter.collect(batches, noise).items()}
        return collected

    def mount(self, setup: Setup) -> None:
        """Changes what sits on the backbone."""
        if setup == self._setup:
            return
        for adapter in reversed(self._adapters):
            adapter.detach()
        self._adapters, self._setup = [], None  # none is whole until the last line
        for kind, settings in adapters_of(self.config, setup):
            adapter = ADAPTERS[kind]()
            adapter.attach(self.model, settings, self.config.run.seed)
            self._adapters.append(adapter)
        if setup not in self._start:
            if setup == "own" and "memory" in self.config.federation.adapters and not self.config.memory.is_absent:
                load_start(self.backbone, self._live(), self.config.memory)
            self._start[setup] = {name: p.detach().clone() for name, p in self._live().items()}
        if [adapter.kind for adapter in self._adapters] == ["context-vectors"]:
            keep_prompts(self.model, self.config.context_vectors)
        self._prefix = None
        frozen_below = "memory" in self.config.federation.adapters and setup == "own" and not self._injects
        if frozen_below and self.config.prefix.cache != "off":
            self._prefix = PrefixCache(self.model, self.config.prefix, self._kept)
            self._kept = self._prefix.kept
        self._setup = setup

    def nats(self, batch: Mapping[str, Tensor]) -> Tensor:
        """`answer_nats` of the mounted model; without what was computed of the batch before, where that is kept."""
        with nullcontext() if self._prefix is None else self._prefix.over(batch):
            return answer_nats(self.model, batch)

    def start(self, setup: Setup) -> Params:
        """The rules a setup begins with, by canonical name; copies."""
        self.mount(setup)
        return {name: tensor.clone() for name, tensor in self._start[setup].items()}

    def put(self, params: Params) -> dict[str, Tensor]:
        """Copies values into the mounted setup's live parameters, and gives these by name.

        LoRA factors of a lower rank than the model's get zero components.
        """
        live = self._live()
        assign(live, padded(params, live), "the params of this message")
        return live

    def endpoint(self, arm: str) -> Callable[..., tuple[Message, ClientState]]:
        """A client's side of the round loop for one trained arm."""
        kind = TRAINED[arm]
        algorithm = make_algorithm(self.config, arm)
        training = training_of(self.config, arm, sum(bool(splits.train) for splits in self.data.values()))
        exchange, adapters = exchange_of(self.config, arm), adapters_hash(self.config, kind.setup)

        def train(
            client: str, message: Message, state: ClientState, on_progress: OnProgress
        ) -> tuple[Message, ClientState]:
            if message.adapters not in ("", adapters):
                raise MessageError(
                    "adapters",
                    "This client's [memory], [lora] or [context-vectors] are not those of the run: use the same.",
                )
            self.mount(kind.setup)
            problem = ClientProblem(self, client, message.round)
            plan = LocalPlan.of(training, message.round, *self.tasks_in(client, message.round, message.attempt))
            return take_part(algorithm, problem, message, state, plan, exchange, on_progress)

        return train

    def score(
        self, arm: str, client: str, params: Params, on_progress: OnProgress, tasks: Collection[str] | None = None
    ) -> list[Outcome]:
        """Answers a client's test questions in one arm; `tasks` names those of a stream that are asked, None all."""
        view = VIEWS[arm]
        self.mount(view.setup)
        examples = [one for one in self.data[client].test if tasks is None or one.task in tasks]
        outcomes = answer(
            self.model,
            examples,
            params if view.rules else {},
            self.put,
            arm=arm,
            make_cache=self._new_cache,
            ids=view.prompt,
            zero_state_at_question=view.zeroed,
            batch=self.config.evaluation.batch,
            on_scored=lambda done: on_progress({"done": done, "total": len(examples)}),
        )
        pairs = zip(outcomes, examples, strict=True)
        return [replace(outcome, task=one.task, question=question_digest(one)) for outcome, one in pairs]

    def answered(self, arm: str, client: str, params: Params) -> list[Outcome]:
        """A client's validation questions, answered with these rules."""
        self.mount(TRAINED[arm].setup)
        examples, size = self.data[client].validation, self.config.evaluation.batch
        return answer(self.model, examples, params, self.put, arm=arm, make_cache=self._new_cache, batch=size)

    def validate(self, arm: str, client: str, params: Params) -> tuple[float, int]:
        """A client's validation loss: nats per answer token (NaN if not finite), and the number of those tokens."""
        examples = self.data[client].validation
        self.mount(TRAINED[arm].setup)
        size, nats, tokens = self.config.evaluation.batch, 0.0, 0
        with torch.no_grad():
            parts = (
                places[first : first + size]
                for places in with_their_rules(examples, params, self.put)
                for first in range(0, len(places), size)
            )
            for part in parts:
                batch = self.collated([examples[place] for place in part])
                count = int((batch["labels"] != IGNORED).sum())
                try:
                    nats += float(self.nats(batch)) * count
                except NonFiniteError:
                    nats = math.nan
                tokens += count
        return nats / max(1, tokens), tokens

    def _live(self) -> dict[str, Tensor]:
        return {name: p for adapter in self._adapters for name, p in adapter.parameters().items()}

    def _new_cache(self, model: Any) -> Any:
        from transformers import DynamicCache

        if is_recurrent(model):
            return RecurrentCache(model)
        return MemoryCache(model) if is_attached(model) else DynamicCache(config=model.config)
