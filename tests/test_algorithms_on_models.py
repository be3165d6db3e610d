"""Every algorithm on two tiny models of unlike families: the laws that its traits say are its own."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Olmo2Config, Olmo2ForCausalLM

from fednl.arms import adapters_hash
from fednl.client import Bench
from fednl.federation import record
from fednl.federation.algorithms import ALGORITHMS
from fednl.federation.loop import run_rounds
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, equal, personal
from fednl.federation.transport import InProcessTransport, Reply
from fednl.problem import ClientProblem
from fednl.runs import Run
from small_run import byte_tokenizer, settings, tiny_backbone

FAMILIES = ("llama", "olmo2")
KINDS = sorted(ALGORITHMS)


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here loses power: waiting for the disk would be much of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    llama = tiny_backbone(tmp_path_factory.mktemp("llama"))
    olmo2 = tmp_path_factory.mktemp("olmo2") / "model"
    shutil.copytree(llama, olmo2)
    (olmo2 / "model.safetensors").unlink()
    torch.manual_seed(1)
    shape = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    Olmo2ForCausalLM(
        Olmo2Config(vocab_size=len(byte_tokenizer()), pad_token_id=0, eos_token_id=1, **shape, **heads)
    ).save_pretrained(olmo2)
    small = {"data": {"tokens": 430, "clients": 2, "train": 2, "validation": 0, "test": 1, "events": 2}}
    both = {"lora": {"rank": 2, "targets": "q_proj,v_proj"}, "federation": {"shared": ["theta", "lora"]}}
    training = {"training": {"rounds": 2, "local-steps": 1, "batch": 1}}
    return {
        name: Bench(settings(path, **small, **both, **training))
        for name, path in zip(FAMILIES, (llama, olmo2), strict=True)
    }


class Turned(InProcessTransport):
    """Gives replies in the opposite order of the one they were asked for in."""

    def replies(self, deadline_s: float | None, on_progress: Any = None) -> Iterator[Reply]:
        yield from reversed(list(super().replies(deadline_s, on_progress)))


@dataclass(frozen=True)
class Outcome:
    """What a run left: the rules, the clients' states, and all that was sent, in both directions."""

    params: Params
    states: dict[str, ClientState]
    sent: list[Message]

    def same(self, other: Outcome) -> bool:
        assert self.states.keys() == other.states.keys()
        states = all(equal(other.states[client], state) for client, state in self.states.items())
        return equal(self.params, other.params) and states


def outcome(
    bench: Bench,
    kind: str,
    folder: Path,
    *,
    clients: Sequence[str] = (),
    transport_of: type[InProcessTransport] = InProcessTransport,
    stops: Sequence[int] = (),
    keeps: bool = True,
    **training: Any,
) -> Outcome:
    """Two rounds of one algorithm over the given clients, or all, in one sitting or in several."""
    sent: list[Message] = []
    federation = bench.config.federation.model_copy(update={"algorithm": kind})
    # As published FedALA looks at the data for long; FLoRA's merged part alone has more components than these LoRAs.
    own = {"fedala": {"most-passes": 1, "steps": 1}, "flora": {"merged-rank": 1}}.get(kind, {})
    config = bench.config = bench.config.model_copy(update={"federation": federation, "algorithm": own})
    inner = bench.endpoint("federated")

    def endpoint(client: str, message: Message, *rest: Any) -> Any:
        reply, state = inner(client, message, *rest)
        sent.extend([message, reply] if keeps else [])
        return reply, state

    sizes = {client: len(bench.data[client].train) for client in clients or bench.data}
    folder.mkdir(parents=True)
    for stop in (*stops, None):
        transport = transport_of(endpoint, sizes)
        algorithm = ALGORITHMS[kind](config.method_settings, config.federation.shared)
        plan = config.training.model_copy(update=training)
        params = run_rounds(
            algorithm, transport, bench.start("own"), federation, plan, Run(folder), seed=0, stop_after=stop
        )
    return Outcome(params, transport.states(), sent)


@pytest.fixture(scope="module")
def once(benches: dict[str, Bench], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Outcome]:
    """Gives what two rounds of an algorithm on a family came to, done once for all laws."""
    found: dict[tuple[str, str], Outcome] = {}

    def of(family: str, kind: str) -> Outcome:
        if (family, kind) not in found:
            found[family, kind] = outcome(benches[family], kind, tmp_path_factory.mktemp("once") / "run")
        return found[family, kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_real_rules_are_trained_and_only_the_allow_list_leaves_a_client(
    benches: dict[str, Bench], once: Callable[[str, str], Outcome], family: str, kind: str
) -> None:
    done = once(family, kind)
    algorithm = ALGORITHMS[kind](None, ["theta", "lora"])
    allowed = set(algorithm.shared(done.params))
    assert all(set(message.params) == allowed for message in done.sent)
    assert all(set(message.extra) <= set(algorithm.extra(message.params)) for message in done.sent)
    start = benches[family].start("own")
    own = personal(done.params, done.states["passkey"])
    moved = {name for name in start if not torch.equal(own[name], start[name])}
    assert {name.split(".")[-2] for name in moved} >= {"write", "gate", "q_proj"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_in_two_sittings_has_the_bits_of_another_in_one(
    benches: dict[str, Bench], once: Callable[[str, str], Outcome], family: str, kind: str, tmp_path: Path
) -> None:
    """So chance decides nothing, and nothing but a checkpoint is needed to go on."""
    assert outcome(benches[family], kind, tmp_path / "run", stops=(1,)).same(once(family, kind))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ALGORITHMS[kind].traits.order_free])
@pytest.mark.parametrize("family", FAMILIES)
def test_neither_the_order_of_clients_nor_of_replies_changes_a_bit(
    benches: dict[str, Bench], once: Callable[[str, str], Outcome], family: str, kind: str, tmp_path: Path
) -> None:
    bench = benches[family]
    turned = outcome(bench, kind, tmp_path / "run", clients=list(bench.data)[::-1], transport_of=Turned)
    assert turned.same(once(family, kind))


def plain_training(bench: Bench, client: str, moved: Sequence[str]) -> Params:
    """The oracle of local training: one AdamW loop over all rounds, written without the library's loop."""
    training, start = bench.config.training, bench.start("own")
    leaves = {name: torch.nn.Parameter(start[name].clone()) for name in moved}
    optimizer = torch.optim.AdamW(leaves.values(), lr=training.local_lr, weight_decay=0.0)
    for round in range(1, training.rounds + 1):
        problem = ClientProblem(bench, client, round)
        for batch in problem.batches("train", training.local_steps):
            optimizer.zero_grad()
            problem.loss({**start, **leaves}, batch).backward()
            torch.nn.utils.clip_grad_norm_(leaves.values(), training.clip)
            optimizer.step()
    return {**start, **{name: leaf.detach() for name, leaf in leaves.items()}}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ALGORITHMS[kind].traits.one_client_is_local])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_client_equals_local_training_to_the_bit(
    benches: dict[str, Bench], family: str, kind: str, tmp_path: Path
) -> None:
    bench = benches[family]
    done = outcome(bench, kind, tmp_path / "run", clients=["passkey"])
    moved = ALGORITHMS[kind](None, ["theta", "lora"]).trainable(done.params)
    assert equal(personal(done.params, done.states["passkey"]), plain_training(bench, "passkey", moved))


def test_c16_memory_stays_flat_over_fifty_rounds_of_a_model(
    benches: dict[str, Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the algorithm whose clients and server both keep the most beside the rules; all on a regression elsewhere."""
    live: dict[int, int] = {}

    def count(folder: Path, round: int, *rest: Any) -> None:
        if round in (10, 50):
            gc.collect()
            live[round] = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    monkeypatch.setattr(record, "save_round", count)
    outcome(benches["llama"], "scaffold", tmp_path / "run", clients=["passkey"], keeps=False, rounds=50)
    assert live[50] <= live[10]


@pytest.mark.parametrize("setup", ["own", "lora"])
def test_b08_what_is_trained_is_float32_over_a_bfloat16_backbone(tmp_path: Path, setup: Any) -> None:
    small = {"data": {"clients": 1, "train": 1, "test": 1}, "lora": {"rank": 2, "targets": "q_proj,v_proj"}}
    config = settings(tiny_backbone(tmp_path / "model"), **small)
    bench = Bench(config.with_overrides(["backbone.dtype=bfloat16"]))
    assert bench.model.get_input_embeddings().weight.dtype == torch.bfloat16
    start = bench.start(setup)
    assert start and {tensor.dtype for tensor in start.values()} == {torch.float32}
    live = bench.put(start)
    assert all(tensor.dtype == torch.float32 and tensor.requires_grad for tensor in live.values())


def test_b10_b11_rules_stay_beside_a_backbone_whose_weights_no_round_touches(tmp_path: Path) -> None:
    """Nothing is merged, into no base of any precision: whatever merging would change cannot change here."""
    small = {"data": {"clients": 1, "train": 1, "test": 1}, "training": {"rounds": 1, "local-steps": 1}}
    both = {"lora": {"rank": 2, "targets": "q_proj,v_proj"}, "federation": {"shared": ["theta", "lora"]}}
    path = tiny_backbone(tmp_path / "model")
    bench = Bench(settings(path, **small, **both).with_overrides(["backbone.dtype=bfloat16"]))
    bare = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path / "model.safetensors").items()}
    bench.put(outcome(bench, "fedavg", tmp_path / "run").params)
    held = {name.replace(".base_layer", ""): tensor for name, tensor in bench.model.state_dict().items()}
    found = [name for name in bare if name in held]
    assert len(found) == len(bare) and all(torch.equal(held[name], bare[name]) for name in found)
    assert any(name.endswith("q_proj.weight") for name in found), "the LoRA sits on some of them"


def test_b06_a_client_with_another_alpha_takes_no_part_and_says_why(benches: dict[str, Bench], tmp_path: Path) -> None:
    own = benches["llama"]
    own.config = own.config.with_overrides(["federation.algorithm=fedavg", "training.rounds=1", "federation.quorum=1"])
    other = Bench(own.config.with_overrides(["lora.alpha=1.0"]))
    endpoints = dict(zip(own.data, (own.endpoint("federated"), other.endpoint("federated")), strict=True))

    def endpoint(client: str, *rest: Any) -> Any:
        return endpoints[client](client, *rest)

    config, run = own.config, Run(tmp_path)
    algorithm = ALGORITHMS["fedavg"](config.method_settings, config.federation.shared)
    adapters = adapters_hash(config, "own")
    start, sizes = own.start("own"), {client: len(splits.train) for client, splits in own.data.items()}
    transport = InProcessTransport(endpoint, sizes)
    run_rounds(algorithm, transport, start, config.federation, config.training, run, seed=0, adapters=adapters)
    rows = {row["name"]: row for row in run.read_jsonl("rounds.jsonl")[0]["clients"]}
    assert [rows[client]["status"] for client in own.data] == ["ok", "failed"]
    assert rows[list(own.data)[1]]["reason"] == "adapters"
