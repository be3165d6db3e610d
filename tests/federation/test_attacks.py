"""One hostile client of five, whatever it sends: the rules stay finite, near the others', and the rounds go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federation_toys import GATE, PROJECTION, WRITE, Bench, forge, start_params

from fednl.errors import MessageError
from fednl.federation.exchange import CombineSettings, Exchange, TrafficSettings
from fednl.federation.message import Message
from fednl.federation.params import Params, finite, norm, subtract
from fednl.federation.robust import RULES as ROBUST
from fednl.federation.settings import TrainingSettings
from fednl.federation.transport import Reply
from fednl.federation.validate import Wanted

ATTACKER = "cyd"
SIZES = {"ada": 5, "bob": 4, ATTACKER: 6, "dan": 7, "eve": 5}
CAP = 0.05
ONE_ROUND = TrainingSettings(rounds=1, local_steps=2, batch=4, local_lr=1e-2)
RULES = {
    "capped-mean": CombineSettings(weights="uniform", norm_cap=CAP),
    **{rule: CombineSettings(rule=rule) for rule in ROBUST},
}

Attack = Callable[[Reply], list[Reply]]


def everywhere(value: float) -> Params:
    return {name: torch.full_like(tensor, value) for name, tensor in start_params().items()}


def times(reply: Reply, factor: float) -> Params:
    return {name: tensor * factor for name, tensor in Message.from_bytes(reply.payload).params.items()}


def rewritten(payload: bytes, change: Callable[[dict[str, dict[str, object]]], None]) -> bytes:
    """The same buffer with a header that says something else of its tensors."""
    length = int.from_bytes(payload[:8], "little")
    layout = json.loads(payload[8 : 8 + length])
    change(layout)
    text = json.dumps(layout).encode()
    return len(text).to_bytes(8, "little") + text + payload[8 + length :]


def claims(layout: dict[str, dict[str, object]]) -> None:
    """Says in 128 bytes that a tensor has a million million numbers."""
    layout[f"params/{WRITE}"] |= {"shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}


def no_list(layout: dict[str, dict[str, object]]) -> None:
    """A number of no dimensions, whose shape is a word."""
    layout[f"params/{GATE}"]["shape"] = ""


def endless(layout: dict[str, dict[str, object]]) -> None:
    """A count of steps that no float holds."""
    header = layout["__metadata__"]
    header["fednl"] = str(header["fednl"]).replace('"steps": ', '"steps": 1e999, "more": ')


def impossible(layout: dict[str, dict[str, object]]) -> None:
    """Sides whose product is nothing, and whose steps no integer holds."""
    layout["params/x"] = {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}


ACCEPTED: dict[str, Attack] = {
    "values x 1e6": lambda r: [forge(r, params=times(r, 1e6))],
    "values x -1e6": lambda r: [forge(r, params=times(r, -1e6))],
    "largest floats": lambda r: [forge(r, params=everywhere(3e38))],
    "most examples that pass": lambda r: [forge(r, params=times(r, 50.0), num_examples=10**9)],
    "a little off": lambda r: [forge(r, params={n: t + 0.03 for n, t in times(r, 1.0).items()})],
}
"""Attacks that no check can tell from a client that learned something; a rule has to bound them."""

REFUSED: dict[str, tuple[str, Attack]] = {
    "NaN": ("non-finite", lambda r: [forge(r, params=everywhere(float("nan")))]),
    "Inf": ("non-finite", lambda r: [forge(r, params=everywhere(float("inf")))]),
    "num-examples 1e15": ("num-examples", lambda r: [forge(r, num_examples=10**15)]),
    "num-examples -200": ("num-examples", lambda r: [forge(r, num_examples=-200)]),
    "wrong shape": ("shape", lambda r: [forge(r, params={**times(r, 1.0), WRITE: torch.zeros(9)})]),
    "missing key": ("missing-name", lambda r: [forge(r, params={WRITE: torch.zeros(3)})]),
    "extra key": ("unknown-name", lambda r: [forge(r, params={**times(r, 1.0), "memory.state": torch.zeros(2)})]),
    "wrong dtype": ("dtype", lambda r: [forge(r, params={**times(r, 1.0), GATE: torch.zeros((), dtype=torch.int64)})]),
    "another coding": ("dtype", lambda r: [forge(r, coding="int8-deltas")]),
    "a header that lies about a size": ("malformed", lambda r: [replace(r, payload=rewritten(r.payload, claims))]),
    "a shape that cannot be": ("malformed", lambda r: [replace(r, payload=rewritten(r.payload, impossible))]),
    "a shape that is no list": ("malformed", lambda r: [replace(r, payload=rewritten(r.payload, no_list))]),
    "endless steps": ("malformed", lambda r: [replace(r, payload=rewritten(r.payload, endless))]),
    "a header longer than the message": ("malformed", lambda r: [replace(r, payload=b"\xff" * 7 + b"\x00{}")]),
    "ten times the bytes": ("too-large", lambda r: [replace(r, payload=r.payload + bytes(10**6))]),
    "a stale round": ("stale-round", lambda r: [forge(r, round=0, params=everywhere(1e6))]),
    "another client's name": ("unknown-client", lambda r: [forge(r, client="ada")]),
}
"""Attacks that are told by looking, and the code that they are counted under."""


def attacked(path: Path, attack: Attack, combine: CombineSettings) -> tuple[Params, dict[str, object]]:
    toy = Bench(path, sizes=SIZES, training=ONE_ROUND, exchange=Exchange(combine=combine))

    def change(replies: list[Reply]) -> list[Reply]:
        return [made for r in replies for made in (attack(r) if r.client == ATTACKER else [r])]

    return toy.run(toy.transport(change)), toy.rows()[0]


def honest(path: Path) -> dict[str, Params]:
    toy = Bench(path, sizes=SIZES, training=ONE_ROUND)
    transport = toy.transport()
    toy.run(transport)
    return {r.client: Message.from_bytes(r.payload).params for r in transport.returned if r.client != ATTACKER}


def assert_within_the_declared_bound(rule: str, found: Params, others: dict[str, Params]) -> None:
    """What each rule promises: a distance from the start, or no number outside the honest ones."""
    assert finite(found)
    if rule == "capped-mean":
        assert norm(subtract(found, start_params())) <= CAP * (1 + 1e-5)
        return
    for name, tensor in found.items():
        values = torch.stack([params[name] for params in others.values()])
        # The hostile update is one of those that multi-krum averages only where it lies among them.
        room = 0.03 if rule == "multi-krum" else 0.0
        assert bool((tensor >= values.min(dim=0).values - room - 1e-6).all())
        assert bool((tensor <= values.max(dim=0).values + room + 1e-6).all())


@pytest.mark.parametrize("rule", RULES)
def test_what_passes_the_checks_moves_the_rules_no_further_than_declared(tmp_path: Path, rule: str) -> None:
    others = honest(tmp_path / "honest")
    for number, attack in enumerate(ACCEPTED.values()):
        found, row = attacked(tmp_path / str(number), attack, RULES[rule])
        assert row["refused"] == {}
        assert row["updated"] is True
        assert_within_the_declared_bound(rule, found, others)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_told_by_looking_is_refused_and_the_round_goes_on(tmp_path: Path, rule: str) -> None:
    others = honest(tmp_path / "honest")
    for number, (code, attack) in enumerate(REFUSED.values()):
        found, row = attacked(tmp_path / str(number), attack, RULES[rule])
        assert row["refused"] == {code: 1}
        assert row["updated"] is True
        assert_within_the_declared_bound(rule, found, others)


def test_the_mean_without_a_bound_is_moved_as_far_as_an_attacker_likes(tmp_path: Path) -> None:
    """What the bounds are for: by default, only what can be told by looking is refused."""
    found, row = attacked(tmp_path, ACCEPTED["values x 1e6"], CombineSettings())
    assert row["refused"] == {}
    assert norm(subtract(found, start_params())) > 1e4


def test_a_duplicate_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    for rule, combine in RULES.items():
        found, row = attacked(tmp_path / rule, lambda r: [r, forge(r, params=everywhere(1e6))], combine)
        assert row["refused"] == {"duplicate": 1}
        assert row["updated"] is True
        plain, _ = attacked(tmp_path / f"{rule}-plain", lambda r: [r], combine)
        assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("attack", [name for name, (code, _) in REFUSED.items() if code != "non-finite"])
def test_all_but_its_numbers_is_checked_before_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    toy = Bench(tmp_path, sizes=SIZES, training=ONE_ROUND)
    transport = toy.transport()
    toy.run(transport)
    genuine = next(reply for reply in transport.returned if reply.client == ATTACKER)
    code, make = REFUSED[attack]
    payload = make(genuine)[0].payload

    def never(*_: object) -> None:
        raise AssertionError("a hostile buffer was handed to the reader of tensors")

    monkeypatch.setattr("safetensors.torch.load", never)
    wanted = Wanted(start_params(), {}, 1, toy.run_folder.path.name)
    with pytest.raises(MessageError) as caught:
        wanted.read(payload, ATTACKER)
    assert caught.value.code == code


@pytest.mark.parametrize("content", ["values", "deltas"])
def test_attacks_in_fewer_bits_are_refused_or_bounded(tmp_path: Path, content: str) -> None:
    traffic = TrafficSettings(up="bfloat16", content=content)
    exchange = Exchange(traffic, RULES["capped-mean"])
    toy = Bench(tmp_path, sizes=SIZES, training=ONE_ROUND, exchange=exchange)

    def spoil(replies: list[Reply]) -> list[Reply]:
        infinite = {name: torch.full(t.shape, 0x7F80, dtype=torch.int16) for name, t in start_params().items()}
        large = {name: torch.full(t.shape, 0x7F00, dtype=torch.int16) for name, t in start_params().items()}
        made = {ATTACKER: infinite, "dan": large}
        return [forge(r, params=made[r.client]) if r.client in made else r for r in replies]

    found = toy.run(toy.transport(spoil))
    assert toy.rows()[0]["refused"] == {"non-finite": 1}
    assert toy.rows()[0]["metrics"]["capped_clients"] >= 1
    assert norm(subtract(found, start_params())) <= CAP * (1 + 1e-5)
    assert PROJECTION in found
