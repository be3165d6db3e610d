"""What one process holds: setups that come and go, losses that depend on nothing but rules and data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from fednl.client import Bench
from fednl.errors import BackboneError, CheckpointError, MessageError, NonFiniteError
from fednl.federation.lora_ranks import cut, padded
from fednl.federation.message import Message
from fednl.federation.validate import check_update
from fednl.problem import ClientProblem
from fednl.training import partition_rows, train
from small_run import byte_tokenizer, settings, tiny_backbone


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def test_the_validation_loss_does_not_depend_on_the_batch(backbone: Path) -> None:
    losses = []
    for batch in (1, 2, 5):
        bench = Bench(settings(backbone, data={"validation": 5, "train": 1, "test": 1}, evaluation={"batch": batch}))
        # Dates have answers of unlike lengths, so a mean of means would depend on who stands beside whom.
        lengths = {len(one.candidate_ids[one.gold]) for one in bench.data["name-date"].validation}
        assert len(lengths) > 1
        loss, tokens = bench.validate("federated", "name-date", bench.start("own"))
        assert tokens == sum(len(one.candidate_ids[one.gold]) for one in bench.data["name-date"].validation)
        losses.append(loss)
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-6)


def test_batches_of_one_give_each_example_once_a_pass_and_another_purpose_another_order(backbone: Path) -> None:
    problem = ClientProblem(Bench(settings(backbone)), "passkey", round=1)

    def drawn(purpose: str, steps: int, size: int = 0) -> list[list[tuple[int, ...]]]:
        return [[tuple(row) for row in b["input_ids"].tolist()] for b in problem.batches(purpose, steps, size)]

    assert problem.num_examples == 6
    ones = drawn("fisher", 6, 1)
    assert [len(batch) for batch in ones] == [1] * 6
    assert len({batch[0] for batch in ones}) == 6
    assert drawn("fisher", 6, 1) == ones
    assert drawn("mix", 6, 1) != ones
    assert [len(batch) for batch in drawn("train", 3)] == [2, 2, 2]


@pytest.mark.parametrize("keys", ["token", "context"])
def test_training_over_a_kept_prefix_gives_the_same_losses(backbone: Path, keys: str) -> None:
    """Two rounds of a client and a validation, with a change of setup between; rounding is all that differs."""
    losses: dict[str, list[float]] = {}
    for cache in ("off", "memory"):
        bench = Bench(settings(backbone, memory={"keys": keys, "address-layer": 0}, prefix={"cache": cache}))
        endpoint, state = bench.endpoint("federated"), {}
        message = Message(bench.start("own"), round=1, client="passkey")
        found = losses[cache] = []
        for number in (1, 2):
            reply, state = endpoint("passkey", replace(message, round=number), state, lambda facts: None)
            message = Message(reply.params, round=number, client="passkey")
            found += [reply.metrics["loss_first"], reply.metrics["loss_last"]]
            found.append(bench.validate("federated", "passkey", reply.params)[0])
            bench.mount("window")
    assert losses["memory"] == pytest.approx(losses["off"], rel=1e-5)
    assert bench._prefix is None and bench._kept is not None and len(bench._kept) >= 6
    bench.mount("own")
    assert bench._prefix is not None and bench._prefix.kept is bench._kept


def test_a_setup_that_failed_to_mount_is_not_taken_for_mounted(backbone: Path) -> None:
    bench = Bench(settings(backbone, memory={"start": "public"}))
    with torch.no_grad():
        ids = torch.tensor([bench.data["passkey"].test[0].prompt_ids])
        bare = bench.model(ids).logits
        for _ in range(2):
            with pytest.raises(CheckpointError, match='"public": none are shipped'):
                bench.mount("own")
        bench.mount("bare")
        assert torch.equal(bench.model(ids).logits, bare)


def test_a_backbone_that_is_not_recognised_is_named_with_its_key(tmp_path: Path, backbone: Path) -> None:
    tokenizer = byte_tokenizer()
    size = {"vocab_size": len(tokenizer), "hidden_size": 16, "ffn_dim": 16, "word_embed_proj_dim": 16}
    folder = tmp_path / "opt"
    config = OPTConfig(**size, num_hidden_layers=1, num_attention_heads=2, bos_token_id=1, eos_token_id=1)
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(BackboneError, match=rf'^backbone\.id = "{folder}": .*opt.* use one of: llama'):
        train(settings(backbone).with_overrides([f"backbone.id={folder}"]), tmp_path / "run")


def test_a_backbone_with_a_last_position_starts_fresh(tmp_path: Path, backbone: Path) -> None:
    """The text that rules are centred on is longer than GPT-2 has positions for."""
    tokenizer, folder = byte_tokenizer(), tmp_path / "gpt2"
    size = {"vocab_size": len(tokenizer), "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 600}
    GPT2LMHeadModel(GPT2Config(**size, bos_token_id=1, eos_token_id=1)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    bench = Bench(settings(backbone).with_overrides([f"backbone.id={folder}"]))
    shifts = [tensor for name, tensor in bench.start("own").items() if name.endswith((".centre", "_shift"))]
    assert shifts and all(bool(tensor.any()) for tensor in shifts)
    assert math.isfinite(bench.validate("federated", "passkey", bench.start("own"))[0])


def test_what_is_said_while_loading_reaches_the_display(backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fednl.models import load_backbone

    def slow(chosen: Any, progress: Any = None) -> Any:
        progress("downloading 93 MB")
        return load_backbone(chosen)

    monkeypatch.setattr("fednl.client.load_backbone", slow)
    told: list[Any] = []
    partition_rows(settings(backbone), told.append)
    assert {"event": "note", "text": "downloading 93 MB"} in told


def test_training_that_comes_to_nan_is_refused_as_such_and_does_not_crash(backbone: Path) -> None:
    """The memory refuses NaN by an error; a client's round still ends in a reply, whose NaN the server counts."""
    bench = Bench(settings(backbone))
    start = bench.start("own")
    received = Message(start, round=1, run="r", client="passkey")
    wrong = {name: torch.full_like(t, torch.nan) if name.endswith("write.bias") else t for name, t in start.items()}
    reply, state = bench.endpoint("federated")("passkey", replace(received, params=wrong), {}, lambda facts: None)
    assert state == {} and not all(bool(t.isfinite().all()) for t in reply.params.values())
    with pytest.raises(MessageError) as refused:
        check_update(reply, start, 1, "passkey", run="r")
    assert refused.value.code == "non-finite"
    assert math.isnan(bench.validate("federated", "name-date", wrong)[0])
    with pytest.raises(NonFiniteError, match=r'^arm "federated" was not scored: Memory layer \d+: its rules hold'):
        bench.score("federated", "name-date", wrong, lambda facts: None)
    healthy, _ = bench.endpoint("federated")("passkey", received, {}, lambda facts: None)
    assert all(bool(t.isfinite().all()) for t in healthy.params.values())


@pytest.mark.parametrize(
    ("algorithm", "own"), [("fedavg", {}), ("ffa-lora", {}), ("flexlora", {}), ("flora", {"flora": {"merged-rank": 2}})]
)
def test_clients_of_unlike_lora_ranks_train_on_one_backbone(
    backbone: Path, tmp_path: Path, algorithm: str, own: dict[str, Any]
) -> None:
    config = settings(
        backbone,
        memory={"layers": "none"},
        lora={"rank": 4, "targets": "q_proj,v_proj"},
        training={"rounds": 2, "optimizer-state": "reset"},
        federation={"algorithm": algorithm, "shared": "lora", "lora-ranks": ["passkey=1"]},
        **own,
    )
    rows = train(config, tmp_path / "run").read_jsonl("rounds.jsonl")
    assert all(row["updated"] and not row["refused"] for row in rows)
    up = {client["name"]: client["up_bytes"] for client in rows[-1]["clients"]}
    assert up["passkey"] < min(size for name, size in up.items() if name != "passkey")
    error = rows[-1]["metrics"].get("lora_error")
    assert (error is None) == (algorithm == "ffa-lora")
    if algorithm == "flora":
        assert error is not None and error > 0.01  # three clients' stacks in two components


def test_padding_leaves_a_lower_rank_its_own_loss_and_gradient(backbone: Path) -> None:
    config = settings(backbone, memory={"layers": "none"}, lora={"rank": 3, "targets": "q_proj"})
    bench = Bench(config)
    problem = ClientProblem(bench, "passkey", round=1)
    params = {name: tensor + 0.1 for name, tensor in bench.start("own").items()}
    batch = next(iter(problem.batches("train", 1)))
    low = cut(params, 2)
    loss, grads = problem.run(low, batch)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in low.values()]
    zeroed, whole = problem.run(padded(low, params), batch)
    assert torch.equal(loss, zeroed)
    for grad, (name, full) in zip(grads, zip(low, whole, strict=True), strict=True):
        assert torch.equal(grad, cut({name: full}, 2)[name])
        assert not cut({name: full}, None, skip=2)[name].any()  # what is padded has no gradient
