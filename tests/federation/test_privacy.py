from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import GATE, PROJECTION, WRITE, Bench, Regression, forge, start_params

from fednl.errors import CheckpointError, SettingsError
from fednl.federation.accounting import Spent, begin_privacy, epsilon_of, spent_epsilon
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.checkpoint import read_tensors
from fednl.federation.exchange import CombineSettings, Exchange, PrivacySettings, TrafficSettings, check_exchange
from fednl.federation.message import Message
from fednl.federation.params import Params, equal, norm, shortened, subtract
from fednl.federation.privacy import PrivateRound, PrivateSum, noisy
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.traits import Traits
from fednl.federation.transport import Reply

UNIFORM = CombineSettings(weights="uniform")
CENTRAL = PrivacySettings(mode="central", noise_multiplier=1.5, clip=0.1, noise_seed=7)
LOCAL = PrivacySettings(mode="local", noise_multiplier=0.5, clip=0.1, noise_seed=7)


def private(settings: PrivacySettings, **others: Any) -> Exchange:
    return Exchange(combine=UNIFORM, privacy=settings, **others)


def update(*values: float) -> Message:
    return Message({"w": torch.tensor(values)}, num_examples=1)


def noiseless(clip: float, planned: int, *updates: Message, **keys: Any) -> PrivateSum:
    settings = PrivacySettings(mode="central", noise_multiplier=1e-12, clip=clip, **keys)
    total = PrivateSum(settings, Spent(1, clip), planned, 1).starting_from({"w": torch.zeros(2)})
    for message in updates:
        total.add(message)
    return total


def test_the_sum_of_clipped_changes_is_divided_by_the_planned_number() -> None:
    total = noiseless(1.0, 4, update(3.0, 4.0), update(0.0, 0.5))
    torch.testing.assert_close(total.result().params["w"], torch.tensor([0.6, 1.3]) / 4)
    assert total.result().num_examples == 2


def test_g01_a_client_that_changed_nothing_is_counted_and_divides_by_nothing() -> None:
    total = noiseless(1.0, 2, update(0.0, 0.0), update(0.0, 0.5))
    torch.testing.assert_close(total.result().params["w"], torch.tensor([0.0, 0.25]))
    assert noiseless(1.0, 2).fault()


def test_g01_a_nan_is_refused_before_it_is_clipped(tmp_path: Path) -> None:
    toy = Bench(tmp_path, exchange=private(CENTRAL), training=TrainingSettings(rounds=1, local_steps=1))
    spoilt = {name: torch.full_like(tensor, float("nan")) for name, tensor in start_params().items()}

    def change(replies: list[Reply]) -> list[Reply]:
        return [forge(replies[0], params=spoilt), *replies[1:]]

    toy.run(toy.transport(change))
    assert toy.rows()[0]["refused"] == {"non-finite": 1}


def test_no_client_moves_the_sum_by_more_than_the_clip() -> None:
    others = [update(0.3, -0.2), update(5.0, 5.0)]
    without = noiseless(0.5, 3, *others).result().params
    for hostile in (update(1e30, 0.0), update(-3e38, 3e38), update(0.01, 0.0)):
        with_it = noiseless(0.5, 3, *others, hostile).result().params
        assert norm(subtract(with_it, without)) <= 0.5 / 3 * (1 + 1e-5)


def test_the_noise_has_the_promised_size_and_is_another_each_round() -> None:
    start = {"w": torch.zeros(200, 100), "b": torch.zeros(())}
    settings = PrivacySettings(mode="central", noise_multiplier=2.0, clip=0.3)
    drawn = []
    for round in (1, 2):
        total = PrivateSum(settings, Spent(11, 0.3), 5, round).starting_from(start)
        total.add(Message(start, num_examples=1))
        drawn.append(total.result().params["w"])
    wanted = 2.0 * 0.3 / 5
    for noise in drawn:
        assert float(noise.std()) == pytest.approx(wanted, rel=0.03)
        assert abs(float(noise.mean())) < 5 * wanted / math.sqrt(noise.numel())
    assert abs(float((drawn[0] * drawn[1]).mean())) < 5 * wanted**2 / math.sqrt(drawn[0].numel())


def test_an_adaptive_clip_goes_to_the_quantile_of_lengths() -> None:
    settings = PrivacySettings(mode="central", noise_multiplier=1e-3, clip=100.0, adaptive_clip=True, clip_quantile=0.5)
    spent = Spent(3, settings.clip)
    start = {"w": torch.zeros(2)}
    for number in range(1, 121):
        one = PrivateRound(settings, spent, ["a"] * 400, 400, number)
        assert one.sum is not None
        total = one.sum.starting_from(start)
        for client in range(9):
            for _ in range(44):
                total.add(update(0.1 * (client + 1), 0.0))
        spent = one.after([])
    assert 0.4 < spent.clip < 0.6


def test_count_and_sum_together_are_as_noisy_as_the_setting_says() -> None:
    settings = PrivacySettings(mode="central", noise_multiplier=1.2, adaptive_clip=True)
    for planned in (7, 1000):
        total = PrivateSum(settings, Spent(1, 1.0), planned, 1)
        together = total._noise_of_the_sum() ** -2 + (2 * total._noise_of_the_count()) ** -2
        assert together**-0.5 == pytest.approx(1.2)


def test_central_noise_reaches_the_rules_and_leaves_the_messages_alone(tmp_path: Path) -> None:
    training = TrainingSettings(rounds=1, local_steps=2, batch=4)
    toy = Bench(tmp_path / "run", exchange=private(CENTRAL), training=training)
    found = toy.run()
    exact = Bench(
        tmp_path / "exact", exchange=private(PrivacySettings(mode="central", noise_multiplier=1e-9, clip=0.1))
    )
    exact.training = training
    without = exact.run()
    moved = norm(subtract(without, start_params()))
    assert 0 < moved <= 0.1 * (1 + 1e-6)
    difference = subtract(found, without)
    assert 0.2 * 1.5 * 0.1 / 4 < norm(difference) / math.sqrt(7) < 3 * 1.5 * 0.1 / 4


def test_what_noise_does_not_cover_is_not_sent(tmp_path: Path) -> None:
    for settings in (CENTRAL, LOCAL):
        toy = Bench(tmp_path / settings.mode, exchange=private(settings), training=TrainingSettings(rounds=1))
        transport = toy.transport()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fednl.federation.accounting.check_accounting", lambda settings: None)
            patch.setattr("fednl.federation.accounting.epsilon_of", lambda releases, delta: 1.0)
            toy.run(transport)
        for reply in transport.returned:
            message = Message.from_bytes(reply.payload)
            assert message.num_examples == 1
            assert set(message.metrics) == {"steps"}
        row = toy.rows()[0]
        assert row["metrics"].keys() == ({"clip", "epsilon"} if settings is CENTRAL else {"epsilon"})
        assert all("loss" not in client for client in row["clients"])


def test_local_noise_is_the_clients_own_and_comes_once_a_round(tmp_path: Path) -> None:
    training = TrainingSettings(rounds=2, local_steps=1, optimizer_state="reset")
    toy = Bench(tmp_path, exchange=private(LOCAL), training=training)
    transport = toy.transport()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fednl.federation.accounting.check_accounting", lambda settings: None)
        patch.setattr("fednl.federation.accounting.epsilon_of", lambda releases, delta: 1.0)
        toy.run(transport)
    secrets = {client: int(state["privacy/secret"]) for client, state in transport.states().items()}
    assert len(set(secrets.values())) == len(secrets)
    start, trained = start_params(), {name: tensor + 1 for name, tensor in start_params().items()}
    first = noisy(trained, start, LOCAL, 5, "ada", 1)
    assert equal(first, noisy(trained, start, LOCAL, 5, "ada", 1))
    others = [noisy(trained, start, LOCAL, *of) for of in ((6, "ada", 1), (5, "bob", 1), (5, "ada", 2))]
    assert not any(equal(first, other) for other in others)
    quiet = noisy(trained, start, LOCAL.model_copy(update={"noise_multiplier": 1e-9}), 5, "ada", 1)
    assert norm(subtract(quiet, start)) == pytest.approx(0.1, rel=1e-5)


def test_no_two_answers_share_their_noise() -> None:
    """Noise that went by the round alone would cancel between two answers to one round."""
    settings = LOCAL.model_copy(update={"noise_multiplier": 50.0})
    start, other = start_params(), {name: tensor + 0.5 for name, tensor in start_params().items()}

    def noise(begin: Params, moved: float) -> Params:
        trained = {name: tensor + moved for name, tensor in begin.items()}
        found = noisy(trained, begin, settings, 5, "ada", 2)
        return subtract(subtract(found, begin), shortened(subtract(trained, begin), settings.clip))

    drawn = [noise(start, 1e-3), noise(other, 1e-3), noise(start, 2e-3)]
    for first, second in itertools.combinations(drawn, 2):
        assert norm(subtract(first, second)) > 0.5 * norm(first)
    central = PrivacySettings(mode="central", noise_multiplier=50.0, clip=1.0)
    moved = []
    for updates in ([update(0.1, 0.0)], [update(0.1, 0.0), update(0.0, 0.1)]):  # the second time one more comes
        total = PrivateSum(central, Spent(7, 1.0), 4, 1).starting_from({"w": torch.zeros(2)})
        for one in updates:
            total.add(one)
        moved.append(total.result().params)
    assert norm(subtract(*moved)) > 1.0


def test_g09_a_client_with_few_examples_shares_nothing(tmp_path: Path) -> None:
    few = Exchange(privacy=PrivacySettings(min_examples=6))
    toy = Bench(tmp_path / "few", exchange=few, training=TrainingSettings(rounds=1, local_steps=2))
    transport = toy.transport()
    found = toy.run(transport)
    row = {client["name"]: client["status"] for client in toy.rows()[0]["clients"]}
    assert row == {"ada": "withheld", "bob": "withheld", "cyd": "ok", "dan": "ok"}
    for reply in transport.returned:
        message = Message.from_bytes(reply.payload)
        if row[reply.client] == "withheld":
            assert message.num_examples == 0
            assert equal(message.params, start_params())
    only = Bench(tmp_path / "only", sizes={"cyd": 12, "dan": 7}, training=TrainingSettings(rounds=1, local_steps=2))
    assert equal(found, only.run())


def test_clients_are_drawn_by_secret_independent_coins() -> None:
    clients = [f"client-{number}" for number in range(400)]
    settings = PrivacySettings(mode="central")

    def drawn(secret: int, number: int) -> list[str]:
        return PrivateRound(settings, Spent(secret, 1.0), clients, 100, number).draw(clients, [])

    sizes = [len(drawn(1, number)) for number in range(1, 41)]
    assert abs(sum(sizes) / len(sizes) - 100) < 5
    assert len(set(sizes)) > 5
    assert drawn(1, 1) == drawn(1, 1) != drawn(2, 1)
    assert PrivateRound(settings, Spent(1, 1.0), clients, 400, 1).draw(clients[:9], []) == sorted(clients[:9])
    assert PrivateRound(LOCAL, Spent(1, 1.0), clients, 100, 1).draw(clients, clients[:2]) == clients[:2]


def test_the_secret_is_in_the_checkpoint_and_nowhere_else(tmp_path: Path) -> None:
    settings = PrivacySettings(mode="central", clip=0.1)
    toy = Bench(tmp_path, exchange=private(settings), training=TrainingSettings(rounds=1, local_steps=1))
    transport = toy.transport()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fednl.federation.accounting.check_accounting", lambda settings: None)
        patch.setattr("fednl.federation.accounting.epsilon_of", lambda releases, delta: 1.0)
        toy.run(transport)
    secret = json.loads((tmp_path / "checkpoints/round-1/state.json").read_text())["state"]["spent"]["secret"]
    assert secret > 2**20
    assert begin_privacy_secret(settings) != begin_privacy_secret(settings)
    sent = b"".join(
        [message.to_bytes() for message in transport.sent] + [reply.payload for reply in transport.returned]
    )
    told = (tmp_path / "rounds.jsonl").read_bytes() + json.dumps(toy.events, default=str).encode() + sent
    assert str(secret).encode() not in told


def begin_privacy_secret(settings: PrivacySettings) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fednl.federation.accounting.check_accounting", lambda settings: None)
        spent = begin_privacy(settings, 9)
    assert spent is not None
    return spent.secret


def test_the_state_survives_json() -> None:
    spent = Spent(5, 0.25).with_release(1.0, 0.5).with_release(1.0, 0.5).with_release(2.0, 0.5)
    assert spent.releases == ((1.0, 0.5, 2), (2.0, 0.5, 1))
    assert Spent.from_dict(json.loads(json.dumps(spent.to_dict()))) == spent


def test_a_private_run_resumes_to_the_bit(tmp_path: Path) -> None:
    settings = PrivacySettings(mode="central", clip=0.1, noise_seed=3, adaptive_clip=True, noise_multiplier=0.3)
    federation = FederationSettings(clients_per_round=3, max_failed_rounds=9)
    training = TrainingSettings(rounds=4, local_steps=1)
    whole = Bench(tmp_path / "whole", exchange=private(settings), settings=federation, training=training)
    halves = Bench(tmp_path / "halves", exchange=private(settings), settings=federation, training=training)
    halves.run(stop_after=2)
    assert equal(halves.run(), whole.run())
    told = [[row["metrics"].get(key) for row in toy.rows() for key in ("epsilon", "clip")] for toy in (whole, halves)]
    assert told[0] == told[1]


def test_g05_without_the_extra_a_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "dp_accounting" else find(name))
    with pytest.raises(SettingsError, match=r'mode = "central" needs dp-accounting.*fednl\[privacy\]'):
        begin_privacy(CENTRAL, 9)
    assert begin_privacy(PrivacySettings(), 9) is None


def test_g05_epsilon_after_ten_rounds_is_dp_accountings_own(tmp_path: Path) -> None:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    training = TrainingSettings(rounds=10, local_steps=1)
    toy = Bench(tmp_path / "all", exchange=private(CENTRAL), training=training)
    toy.run()
    accountant = RdpAccountant()
    for row in toy.rows():
        accountant.compose(dp_accounting.GaussianDpEvent(CENTRAL.noise_multiplier))
        assert row["metrics"]["epsilon"] == pytest.approx(accountant.get_epsilon(CENTRAL.delta), rel=1e-9)
    assert toy.events[-1]["metrics"]["epsilon"] == toy.rows()[-1]["metrics"]["epsilon"]
    drawn = FederationSettings(clients_per_round=2, max_failed_rounds=10)
    some = Bench(tmp_path / "some", exchange=private(CENTRAL), training=training, settings=drawn)
    some.run()
    accountant = RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(CENTRAL.noise_multiplier))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 10))
    assert some.rows()[-1]["metrics"]["epsilon"] == pytest.approx(accountant.get_epsilon(CENTRAL.delta), rel=1e-9)


def test_epsilon_lies_between_the_exact_figure_and_the_plain_renyi_bound() -> None:
    """Ten Gaussian releases of noise z are one of noise z / sqrt(10), whose exact curve is known in closed form."""
    noise, delta = 4.0, 1e-5
    found = epsilon_of([(noise, 1.0, 10)], delta)
    one = noise / math.sqrt(10)

    def exact_delta(epsilon: float) -> float:
        def phi(x: float) -> float:
            return 0.5 * math.erfc(-x / math.sqrt(2))

        return phi(0.5 / one - epsilon * one) - math.exp(epsilon) * phi(-0.5 / one - epsilon * one)

    plain = min(a / (2 * one**2) + math.log(1 / delta) / (a - 1) for a in [1 + k / 10 for k in range(1, 600)])
    assert exact_delta(found) <= delta
    assert found <= plain
    assert epsilon_of([(noise, 1.0, 4), (noise, 1.0, 6)], delta) == pytest.approx(found, rel=1e-12)


def test_the_run_stops_before_the_round_that_the_budget_cannot_pay(tmp_path: Path) -> None:
    budget = epsilon_of([(1.5, 1.0, 3)], 1e-5) * 1.0001
    settings = CENTRAL.model_copy(update={"epsilon": budget})
    toy = Bench(tmp_path / "run", exchange=private(settings), training=TrainingSettings(rounds=9, local_steps=1))
    found = toy.run()
    assert [row["round"] for row in toy.rows()] == [1, 2, 3]
    assert toy.rows()[-1]["metrics"]["epsilon"] <= budget
    assert "stopped after round 3 of 9" in toy.events[-1]["text"]
    assert equal(toy.run(), found)
    assert len(toy.rows()) == 3
    small = CENTRAL.model_copy(update={"epsilon": 0.1})
    with pytest.raises(SettingsError, match="the first round alone costs"):
        Bench(tmp_path / "small", exchange=private(small)).run()


def test_local_noise_costs_each_client_its_own_rounds_at_half_the_noise(tmp_path: Path) -> None:
    drawn = FederationSettings(clients_per_round=2)
    toy = Bench(tmp_path, exchange=private(LOCAL), training=TrainingSettings(rounds=4, local_steps=1), settings=drawn)
    toy.run()
    counts: dict[str, int] = {}
    for row in toy.rows():
        for client in row["clients"]:
            counts[client["name"]] = counts.get(client["name"], 0) + 1
        most = max(counts.values())
        assert row["metrics"]["epsilon"] == pytest.approx(epsilon_of([(0.25, 1.0, most)], LOCAL.delta), rel=1e-9)
    assert spent_epsilon(LOCAL, Spent(1, 0.1, (), counts)) == toy.rows()[-1]["metrics"]["epsilon"]


@pytest.mark.parametrize(
    ("exchange", "traits", "words"),
    [
        (Exchange(privacy=CENTRAL), Traits(), 'weights = "uniform"'),
        (private(CENTRAL), Traits(sends_extra=True), "lets out"),
        (private(CENTRAL), Traits(averages_products=True), "lets out"),
        (
            Exchange(combine=CombineSettings(rule="median", weights="uniform"), privacy=CENTRAL),
            Traits(),
            "hides in a sum",
        ),
        (private(PrivacySettings(secure=True, mode="local")), Traits(), "secure = true"),
        (private(PrivacySettings(secure=True), traffic=TrafficSettings(up="float16")), Traits(), 'up = "float32"'),
        (private(PrivacySettings(mode="local", adaptive_clip=True)), Traits(), "adaptive-clip"),
    ],
)
def test_settings_that_would_break_a_promise_are_refused(exchange: Exchange, traits: Traits, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check_exchange(exchange, FederationSettings(), traits, 9)


def test_g04_clipping_is_of_whole_clients_over_all_shared_rules_together(tmp_path: Path) -> None:
    start = {WRITE: torch.zeros(3), GATE: torch.zeros(()), PROJECTION: torch.zeros(3)}
    settings = PrivacySettings(mode="central", noise_multiplier=1e-12, clip=1.0)
    total = PrivateSum(settings, Spent(1, 1.0), 1, 1).starting_from(start)
    total.add(
        Message({WRITE: torch.tensor([3.0, 0, 0]), GATE: torch.tensor(4.0), PROJECTION: torch.zeros(3)}, num_examples=1)
    )
    assert norm(total.result().params) == pytest.approx(1.0, rel=1e-6)
    toy = Bench(
        tmp_path, algorithm=FedAvg(shared="memory"), exchange=private(CENTRAL), training=TrainingSettings(rounds=1)
    )
    found = toy.run()
    assert torch.equal(found[PROJECTION], start_params()[PROJECTION])


def test_g03_what_is_saved_after_a_private_round_is_what_the_run_has(tmp_path: Path) -> None:
    toy = Bench(tmp_path, exchange=private(CENTRAL), training=TrainingSettings(rounds=1, local_steps=2))
    found = toy.run()
    saved, _ = read_tensors(tmp_path / "final" / "params.safetensors")
    assert equal(saved, found)
    problem = Regression("dan", 7)
    batch = next(problem.batches("probe", 1))
    assert float(problem.loss(saved, batch)) == float(problem.loss(found, batch))
    assert float(problem.loss(saved, batch)) != float(problem.loss(start_params(), batch))


def test_g10_a_pickle_in_somebodys_checkpoint_is_never_opened(tmp_path: Path) -> None:
    toy = Bench(tmp_path, training=TrainingSettings(rounds=1, local_steps=1))
    toy.run()
    place = tmp_path / "checkpoints/round-1"
    trap = b"cos\nsystem\n(S'touch " + str(tmp_path / "opened").encode() + b"'\ntR."
    (place / "server.safetensors").write_bytes(trap)
    facts = json.loads((place / "state.json").read_text())
    facts["files"]["server.safetensors"] = hashlib.sha256(trap).hexdigest()
    (place / "state.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="damaged"):
        toy.run()
    assert not (tmp_path / "opened").exists()


def test_two_arms_with_a_fixed_seed_do_not_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednl.federation.accounting.check_accounting", lambda settings: None)
    spent = [begin_privacy(CENTRAL, 9, arm) for arm in ("", "arms/federated-lora", "")]
    assert spent[0] == spent[2] != spent[1]


def test_a_delta_that_promises_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednl.federation.accounting.check_accounting", lambda settings: None)
    with pytest.raises(SettingsError, match="below 1 / 200"):
        begin_privacy(CENTRAL.model_copy(update={"delta": 0.005}), 200)
    assert begin_privacy(CENTRAL.model_copy(update={"delta": 0.004}), 200) is not None
