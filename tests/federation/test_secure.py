from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import PROJECTION, SIZES, WRITE, Bench, Tampered, forge, start_params

from fednl.errors import FednlError, MessageError, SettingsError
from fednl.federation import masking
from fednl.federation.exchange import CombineSettings, Exchange, PrivacySettings
from fednl.federation.masked_sum import MaskedSum
from fednl.federation.message import Message
from fednl.federation.own_store import OwnStore
from fednl.federation.params import ClientState, Params, finite, max_abs, norm, subtract
from fednl.federation.secure import (
    STAGES,
    answer,
    forget,
    hold,
    layout,
    resolution,
    steps_per_range,
    threshold,
    to_numbers,
)
from fednl.federation.settings import TrainingSettings
from fednl.federation.transport import InProcessTransport, Reply

UNIFORM = CombineSettings(weights="uniform")
SECURE = Exchange(combine=UNIFORM, privacy=PrivacySettings(secure=True, secure_range=20.0))
FIVE = {**SIZES, "eve": 6}


def lora_changes(clients: int, numbers: int = 3000) -> dict[str, Params]:
    """Changes as LoRA makes them, of size 1e-4."""
    rng = torch.Generator().manual_seed(1)
    return {
        f"client-{i}": {"b": 1e-4 * torch.randn(numbers, generator=rng), "a": 1e-4 * torch.randn(2, 3, generator=rng)}
        for i in range(clients)
    }


class Protocol:
    """The four exchanges without a loop: who is lost before which reply, and all that the server sees."""

    def __init__(self, changes: dict[str, Params], range: float = 1.0) -> None:
        self.changes, self.range, self.seen = changes, range, []
        self.states: dict[str, ClientState] = {}

    def run(self, lost: dict[int, list[str]] | None = None) -> tuple[Params, int]:
        lost = lost or {}

        def there(stage: int, clients: list[str]) -> list[str]:
            return [client for client in clients if client not in lost.get(stage, [])]

        keys = {}
        for client in there(0, sorted(self.changes)):
            sent, self.states[client] = hold(self.changes[client], {}, 1)
            keys[client] = self.note(sent)["keys"]
        self.sums = MaskedSum(keys, next(iter(self.changes.values())), self.range)
        together, names = torch.stack([keys[client] for client in self.sums.clients]), self.sums.clients
        shares = {}
        for client in there(1, names):
            given = {"secure/keys": together, "secure/position": torch.tensor(names.index(client))}
            shares[client] = self.ask(1, client, given)["shares"]
        present, came = self.sums.places(shares), []
        for client in there(2, sorted(shares)):
            given = {"secure/shares": self.sums.letters(shares, client), "secure/present": present}
            self.sums.add(client, self.ask(2, client, given)["masked"])
            came.append(client)
        opened = {}
        for client in there(3, came):
            opened[client] = self.ask(3, client, {"secure/present": self.sums.places(came)})["opened"]
        self.came = came
        return self.sums.result(opened, sorted(shares))

    def ask(self, stage: int, client: str, given: Params) -> Params:
        sent, self.states[client] = answer(STAGES[stage], given, self.states[client], 1, self.range)
        return self.note(sent)

    def note(self, sent: Params) -> Params:
        self.seen += [value.clone() for value in sent.values()]
        return {name.removeprefix("secure/"): value for name, value in sent.items()}


def plain_sum(changes: dict[str, Params], clients: list[str]) -> Params:
    first = next(iter(changes.values()))
    return {name: sum(changes[client][name].double() for client in clients) for name in first}


LOST = [{}, {0: ["client-2"]}, {1: ["client-0"]}, {2: ["client-4"]}, {3: ["client-3"]}, {2: ["client-0", "client-1"]}]


@pytest.mark.parametrize("lost", LOST, ids=str)
@pytest.mark.parametrize("range", [1.0, 0.01, 8.0])
def test_the_masked_sum_is_the_plain_sum_of_those_that_came(lost: dict[int, list[str]], range: float) -> None:
    changes = lora_changes(5)
    protocol = Protocol(changes, range)
    found, cut = protocol.run(lost)
    assert cut == 0
    expected = plain_sum(changes, protocol.came)
    assert len(protocol.came) == 5 - len(lost.get(0, []) + lost.get(1, []) + lost.get(2, []))
    error = norm(subtract(found, expected)) / norm(expected)
    assert error < 1e-3
    worst = max_abs(subtract(found, expected))
    assert worst <= len(protocol.came) * resolution(range, len(protocol.sums.clients)) * (1 + 1e-6)
    assert all(forget(state) == {} for client, state in protocol.states.items() if client in protocol.came)


def test_what_the_server_sees_says_nothing_of_a_single_client() -> None:
    changes = lora_changes(5)
    protocol = Protocol(changes)
    protocol.run()
    masked = [seen for seen in protocol.seen if seen.dtype == torch.int32]
    assert len(masked) == 5
    for change, seen in zip(changes.values(), masked, strict=True):
        flat = torch.cat([change[name].double().reshape(-1) for name in sorted(change)])
        numbers = to_numbers(flat, 1.0, 5)
        for other in (seen.double(), seen.double() - numbers.double()):
            correlation = float(torch.corrcoef(torch.stack([other[:-1], flat]))[0, 1])
            assert abs(correlation) < 5 / len(flat) ** 0.5
            # Masked numbers fill all 32 bits evenly; the numbers behind them would fill the middle thousandth.
            assert abs(float(other.mean())) < 5 * 2**32 / (12 * len(flat)) ** 0.5
            assert float(other.std()) == pytest.approx(2**32 / 12**0.5, rel=0.05)
    assert not any(torch.equal(left, right) for i, left in enumerate(masked) for right in masked[:i])


def test_a_client_never_opens_both_halves_and_answers_once() -> None:
    protocol = Protocol(lora_changes(5))
    protocol.run()
    with pytest.raises(MessageError) as caught:
        answer(STAGES[3], {"secure/present": torch.ones(5, dtype=torch.uint8)}, protocol.states["client-0"], 1, 1.0)
    assert caught.value.code == "stale-round"


def held(round: int = 1) -> tuple[torch.Tensor, list[ClientState]]:
    made = [hold({"w": torch.ones(2)}, {}, round) for _ in range(5)]
    return torch.stack([sent["secure/keys"] for sent, _ in made]), [state for _, state in made]


def test_a_client_does_not_help_a_sum_of_too_few() -> None:
    keys, states = held()
    with pytest.raises(MessageError, match="cannot be used"):
        answer(STAGES[1], {"secure/keys": keys[:2], "secure/position": torch.tensor(0)}, states[0], 1, 1.0)
    given = {"secure/keys": keys, "secure/position": torch.tensor(0)}
    letters = {"secure/shares": torch.zeros(5, 164, dtype=torch.uint8)}
    _, ready = answer(STAGES[1], given, states[0], 1, 1.0)
    for few in ([1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1]):
        with pytest.raises(MessageError):
            answer(STAGES[2], {**letters, "secure/present": torch.tensor(few, dtype=torch.uint8)}, ready, 1, 1.0)
    everyone = torch.ones(5, dtype=torch.uint8)
    _, sent = answer(STAGES[2], {**letters, "secure/present": everyone}, ready, 1, 1.0)
    for few in ([1, 1, 0, 0, 0], [0, 0, 0, 0, 0]):
        with pytest.raises(MessageError):
            answer(STAGES[3], {"secure/present": torch.tensor(few, dtype=torch.uint8)}, sent, 1, 1.0)


def test_of_three_clients_no_two_open_a_sum() -> None:
    """Each of two would know the other's change."""
    made = [hold({"w": torch.ones(2)}, {}, 1) for _ in range(3)]
    keys = torch.stack([sent["secure/keys"] for sent, _ in made])
    _, ready = answer(STAGES[1], {"secure/keys": keys, "secure/position": torch.tensor(0)}, made[0][1], 1, 1.0)
    letters = {"secure/shares": torch.zeros(3, 164, dtype=torch.uint8)}
    _, sent = answer(STAGES[2], {**letters, "secure/present": torch.ones(3, dtype=torch.uint8)}, ready, 1, 1.0)
    with pytest.raises(MessageError):
        answer(STAGES[3], {"secure/present": torch.tensor([1, 1, 0], dtype=torch.uint8)}, sent, 1, 1.0)


def test_three_clients_of_whom_one_is_lost_before_its_numbers_make_no_sum(tmp_path: Path) -> None:
    three = dict(list(FIVE.items())[:3])
    toy = Bench(tmp_path, sizes=three, exchange=SECURE, training=TrainingSettings(rounds=1))
    lost = sorted(three)[-1]

    def lose(replies: list[Reply]) -> list[Reply]:
        codings = {Message.from_bytes(reply.payload).coding for reply in replies}
        return [r for r in replies if r.client != lost] if STAGES[2] in codings else replies

    with pytest.raises(FednlError, match="None of the 1 rounds"):
        toy.run(toy.transport(lose))
    assert "2 of 3 clients" in toy.rows()[0]["reason"]


def test_a_client_refuses_another_round_another_place_and_forged_letters() -> None:
    keys, states = held()
    given = {"secure/keys": keys, "secure/position": torch.tensor(0)}
    with pytest.raises(MessageError) as caught:
        answer(STAGES[1], given, states[0], 2, 1.0)
    assert caught.value.code == "stale-round"
    with pytest.raises(MessageError):
        answer(STAGES[1], {**given, "secure/position": torch.tensor(1)}, states[0], 1, 1.0)
    weak = keys.clone()
    weak[1] = 0
    weak[1, :, -1] = 1
    with pytest.raises(MessageError):
        answer(STAGES[1], {**given, "secure/keys": weak}, states[0], 1, 1.0)
    _, ready = answer(STAGES[1], given, states[0], 1, 1.0)
    everyone = torch.ones(5, dtype=torch.uint8)
    forged = {"secure/shares": torch.zeros(5, 164, dtype=torch.uint8), "secure/present": everyone}
    _, sent = answer(STAGES[2], forged, ready, 1, 1.0)
    with pytest.raises(MessageError):
        answer(STAGES[3], {"secure/present": everyone}, sent, 1, 1.0)


def test_g07_too_few_shares_give_nothing_back() -> None:
    secret = masking.new_secret()
    shares = masking.split(secret, 5, 3)
    assert masking.join({0: shares[0], 2: shares[2], 4: shares[4]}) == secret
    assert masking.join(dict(enumerate(shares))) == secret
    with pytest.raises(ValueError):
        masking.join({0: shares[0], 1: shares[1]})
    assert [threshold(clients) for clients in (3, 4, 5, 7, 100)] == [2, 3, 3, 4, 51]


def test_the_parts_of_the_protocol_keep_their_promises() -> None:
    mine, yours = masking.new_secret(), masking.new_secret()
    key = masking.agree(mine, masking.public_key(yours), "mask")
    assert key == masking.agree(yours, masking.public_key(mine), "mask")
    assert key != masking.agree(mine, masking.public_key(yours), "seal")
    for none in (0, 1, masking._PRIME - 1, masking._PRIME):
        with pytest.raises(ValueError):
            masking.agree(mine, none.to_bytes(masking.KEY_BYTES, "big"), "mask")
    sealed = masking.seal(key, b"letter", b"0>1")
    assert b"letter" not in sealed
    assert masking.unseal(key, sealed, b"0>1") == b"letter"
    for spoilt, label in ((sealed[:-1] + bytes([sealed[-1] ^ 1]), b"0>1"), (sealed, b"1>0"), (b"", b"0>1")):
        with pytest.raises(ValueError):
            masking.unseal(key, spoilt, label)
    drawn = masking.mask(b"s" * 32, 4000)
    assert torch.equal(drawn, masking.mask(b"s" * 32, 4000))
    assert int(drawn.min()) >= 0 and int(drawn.max()) < 2**32
    assert float(drawn.double().mean()) == pytest.approx(2**31, rel=0.05)


def test_the_group_is_that_of_rfc_3526() -> None:
    """Its size, both ends as published, and that it and its half are prime by Fermat's test."""
    prime = masking._PRIME
    assert prime.bit_length() == 2048
    assert all(pow(base, number - 1, number) == 1 for number in (prime, prime // 2) for base in (2, 3, 5))
    text = f"{prime:X}"
    assert text.startswith("FFFFFFFFFFFFFFFFC90FDAA22168C234") and text.endswith("15728E5A8AACAA68FFFFFFFFFFFFFFFF")


def test_g08_values_beyond_the_range_are_cut_and_counted() -> None:
    numbers = to_numbers(torch.tensor([0.5, -3.0, 1.0, 1.0001]), 1.0, 4)
    steps = steps_per_range(4)
    assert numbers.tolist() == [steps // 2, -steps, steps, steps, 2]
    changes = {f"c{i}": {"w": torch.tensor([0.25, float(i)])} for i in range(4)}
    found, cut = Protocol(changes, 1.5).run()
    assert cut == 2
    torch.testing.assert_close(found["w"], torch.tensor([1.0, 4.0], dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_a_wrong_share_is_noticed() -> None:
    changes = lora_changes(5, 40)
    protocol = Protocol(changes)
    real = protocol.ask

    def lying(stage: int, client: str, given: Params) -> Params:
        sent = real(stage, client, given)
        return {"opened": (sent["opened"] + 1)} if stage == 3 and client == "client-1" else sent

    protocol.ask = lying  # type: ignore[method-assign]
    with pytest.raises(ValueError):
        protocol.run()
    with pytest.raises(ValueError):
        Protocol(changes).run({2: ["client-0"], 3: ["client-2", "client-3", "client-4"]})


def run(path: Path, exchange: Exchange = SECURE, lose: Any = None, **fields: Any) -> tuple[Params, Bench, Tampered]:
    fields.setdefault("training", TrainingSettings(rounds=2, local_steps=2, batch=4))
    toy = Bench(path, sizes=FIVE, exchange=exchange, **fields)
    transport = toy.transport(lose or (lambda replies: replies))
    return toy.run(transport), toy, transport


def test_a_run_behind_masks_equals_the_uniform_mean(tmp_path: Path) -> None:
    found, toy, transport = run(tmp_path / "masked")
    plain, _, _ = run(tmp_path / "plain", Exchange(combine=UNIFORM))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)
    for row in toy.rows():
        assert row["refused"] == {}
        assert row["metrics"] == {"cut_numbers": 0.0}
        for client in row["clients"]:
            assert (client["status"], client["num_examples"], client["steps"]) == ("ok", 1, 2)
            sizes = [layout(stage, 5, 7) for stage in STAGES]
            tensors = sum(value.nbytes for part in sizes for value in part.values())
            assert client["up_bytes"] - client["up_container_bytes"] == tensors
    replies = [Message.from_bytes(reply.payload) for reply in transport.returned]
    assert len(replies) == 2 * 4 * 5
    assert all(reply.params == {} and set(reply.metrics) <= {"steps"} for reply in replies)


class Loses(Tampered):
    """Loses one client's reply at one exchange of the first round."""

    stage, victims = 0, ("cyd",)

    def replies(self, deadline_s: float | None, on_progress: Any = None) -> Iterator[Reply]:
        came = list(super().replies(deadline_s, on_progress))
        first = came and Message.from_bytes(came[0].payload)
        for reply in came:
            if not (first and first.round == 1 and first.coding == STAGES[self.stage] and reply.client in self.victims):
                yield reply


@pytest.mark.parametrize("stage", range(4))
def test_g07_one_of_five_may_leave_at_each_exchange(tmp_path: Path, stage: int) -> None:
    toy = Bench(tmp_path / "a", sizes=FIVE, exchange=SECURE, training=TrainingSettings(rounds=2, local_steps=2))
    transport = Loses(toy.endpoint(), FIVE, lambda replies: replies)
    transport.stage = stage
    found = toy.run(transport, stop_after=1)
    row = toy.rows()[0]
    assert row["updated"] is True
    # Whoever left before its numbers came is not in the sum; whoever left after them is.
    clients = {client["name"]: client["status"] for client in row["clients"]}
    assert clients["cyd"] == ("ok" if stage == 3 else "late")
    others = Bench(tmp_path / "b", sizes=FIVE, exchange=Exchange(combine=UNIFORM), training=toy.training)
    keep = lambda replies: [r for r in replies if stage == 3 or r.client != "cyd"]  # noqa: E731
    torch.testing.assert_close(found, others.run(others.transport(keep), stop_after=1), rtol=0, atol=1e-6)
    toy.run(transport)
    assert {client["status"] for client in toy.rows()[1]["clients"]} == {"ok"}


@pytest.mark.parametrize("stage", range(4))
def test_g07_three_of_five_leave_no_sum_and_the_rules_stay(tmp_path: Path, stage: int) -> None:
    toy = Bench(tmp_path, sizes=FIVE, exchange=SECURE, training=TrainingSettings(rounds=2, local_steps=2))
    transport = Loses(toy.endpoint(), FIVE, lambda replies: replies)
    transport.stage, transport.victims = stage, ("ada", "bob", "cyd")
    toy.run(transport)
    first, second = toy.rows()
    assert first["updated"] is False
    assert "masked sum" in first["reason"]
    assert second["updated"] is True


def test_the_server_keeps_no_single_update(tmp_path: Path) -> None:
    _, toy, transport = run(tmp_path / "masked")
    _, _, open_transport = run(tmp_path / "plain", Exchange(combine=UNIFORM))
    updates = [Message.from_bytes(reply.payload).params for reply in open_transport.returned if reply.payload]
    written = b"".join(path.read_bytes() for path in sorted(toy.path.rglob("*")) if path.is_file())
    written += b"".join(reply.payload for reply in transport.returned) + str(toy.events).encode()
    for params in updates:
        for name in (WRITE, PROJECTION):
            assert params[name].numpy().tobytes() not in written
            assert (params[name] - start_params()[name]).double().numpy().tobytes() not in written


def test_noise_and_masks_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednl.federation.accounting.check_accounting", lambda settings: None)
    monkeypatch.setattr("fednl.federation.accounting.epsilon_of", lambda releases, delta: 1.0)
    # Masks round the sum, and another sum has other noise: here both have the same.
    monkeypatch.setattr("fednl.federation.privacy._keyed", lambda secret, start, change: secret)
    privacy = PrivacySettings(mode="central", clip=0.05, noise_multiplier=1.0, noise_seed=3)
    masked = privacy.model_copy(update={"secure": True, "secure_range": 0.05})
    found, toy, _ = run(tmp_path / "masked", Exchange(combine=UNIFORM, privacy=masked))
    plain, _, _ = run(tmp_path / "plain", Exchange(combine=UNIFORM, privacy=privacy))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)
    assert set(toy.rows()[0]["metrics"]) == {"cut_numbers", "clip", "epsilon"}


def test_a_range_that_does_not_fit_is_told(tmp_path: Path) -> None:
    for wide in (1e-3, 1e8):
        exchange = Exchange(combine=UNIFORM, privacy=PrivacySettings(secure=True, secure_range=wide))
        found, toy, _ = run(tmp_path / str(wide), exchange)
        assert finite(found)
        notes = [event["text"] for event in toy.events if event["event"] == "note"]
        assert any("raise it" in text if wide < 1 else "lower it" in text for text in notes)
        assert (toy.rows()[0]["metrics"]["cut_numbers"] > 0) == (wide < 1)


def test_a_client_with_nan_stays_out_of_the_sum(tmp_path: Path) -> None:
    toy = Bench(tmp_path, sizes=FIVE, exchange=SECURE, training=TrainingSettings(rounds=1, local_steps=2))
    inner = toy.endpoint()

    def endpoint(client: str, message: Message, state: ClientState, tell: Any) -> Any:
        if client == "bob" and not message.coding.startswith("secure"):
            message = Message(
                {**message.params, WRITE: torch.full((3,), float("nan"))}, round=1, client=client, run="run"
            )
        return inner(client, message, state, tell)

    found = toy.run(InProcessTransport(endpoint, FIVE))
    assert finite(found)
    bob = toy.rows()[0]["clients"][1]
    assert (bob["status"], bob["reason"]) == ("failed", "non-finite")


def test_g07_fewer_than_three_clients_are_refused_before_the_first_round(tmp_path: Path) -> None:
    toy = Bench(tmp_path, sizes={"ada": 3, "bob": 4}, exchange=SECURE)
    with pytest.raises(SettingsError, match="needs 3 clients or more in a round, but 2 are asked"):
        toy.run()
    assert toy.rows() == []


def test_rounds_without_a_sum_end_the_run(tmp_path: Path) -> None:
    toy = Bench(tmp_path, sizes=FIVE, exchange=SECURE, training=TrainingSettings(rounds=1))
    with pytest.raises(FednlError, match="None of the 1 rounds"):
        toy.run(toy.transport(lambda replies: replies[:2]))
    assert "2 clients are too few for a masked sum" in toy.rows()[0]["reason"]


def test_a_forged_answer_is_refused_and_survived(tmp_path: Path) -> None:
    def spoil(replies: list[Reply]) -> list[Reply]:
        message = Message.from_bytes(replies[0].payload)
        if message.coding == STAGES[2]:
            return [forge(replies[0], extra={"secure/masked": torch.zeros(3, dtype=torch.int32)}), *replies[1:]]
        return replies

    found, toy, _ = run(tmp_path, lose=spoil)
    assert toy.rows()[0]["refused"] == {"shape": 1}
    assert toy.rows()[0]["updated"] is True
    assert finite(found)


class OnItsOwn(InProcessTransport):
    """Clients that hold their own states, as across a network."""

    def states(self) -> dict[str, Any]:
        return {}

    def restore(self, states: Any) -> None:
        pass


def test_a_client_with_its_own_store_goes_through_all_exchanges(tmp_path: Path) -> None:
    toy = Bench(tmp_path / "own", sizes=FIVE, exchange=SECURE, training=TrainingSettings(rounds=2, local_steps=2))
    store = OwnStore(toy.endpoint(), tmp_path / "stores", {})
    found = toy.run(OnItsOwn(store, FIVE))
    plain = Bench(tmp_path / "plain", sizes=FIVE, exchange=Exchange(combine=UNIFORM), training=toy.training)
    torch.testing.assert_close(found, plain.run(), rtol=0, atol=1e-6)
    assert [row["updated"] for row in toy.rows()] == [True, True]
