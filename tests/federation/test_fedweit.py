"""FedWeIT: the parts of a task, what is handed from client to client, and old tasks answered with their own parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import (
    GATE,
    PROJECTION,
    SIZES,
    WRITE,
    Bench,
    Bowl,
    Regression,
    Tampered,
    forge,
    in_parts,
    start_params,
)
from pydantic import ValidationError

from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.algorithms.fedweit import FedWeIt, FedWeItSettings
from fednl.federation.apart import Combined
from fednl.federation.checkpoint import load_newest
from fednl.federation.exchange import CombineSettings, Exchange, PrivacySettings, check_exchange
from fednl.federation.local import LocalPlan, train_locally
from fednl.federation.message import Message
from fednl.federation.params import Params, equal, finite, value_and_gradient
from fednl.federation.settings import FederationSettings
from fednl.federation.transport import InProcessTransport, Reply

PART = 2 / 3  # the mask that a task starts with


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def weit(**fields: Any) -> FedWeIt:
    return FedWeIt(FedWeItSettings(**fields), "all")


def stream(path: Path, task_rounds: int = 1, **fields: Any) -> Bench:
    algorithm = FedWeIt(FedWeItSettings(**{"sparsity": 1e-4, **fields}), "all")
    return Bench(path, algorithm=algorithm, task_rounds=task_rounds, dtype=torch.float64)


def test_a_task_starts_at_the_base_to_rounding() -> None:
    base = {"w": torch.randn(4, 3, dtype=torch.float64), "b": numbers(0.5)[0]}
    others = {f"adaptive/{name}": torch.stack([tensor, -tensor]) for name, tensor in base.items()}
    params, state = weit().start(Message(base, others), {}, None)  # type: ignore[arg-type]
    assert {name.split("/")[1] for name in params if "/" in name} == {"mask", "adaptive", "attention"}
    assert params["now/mask/w"].shape == (4,) and params["now/mask/b"].shape == ()
    assert torch.equal(params["now/attention/w"], numbers(0, 0))
    torch.testing.assert_close(params["now/adaptive/w"], base["w"] / 3, rtol=1e-12, atol=0)
    now = weit().answers(base, {**state, **params})
    assert now.keys() == base.keys()
    for name, tensor in base.items():
        torch.testing.assert_close(now[name], tensor, rtol=1e-14, atol=0)


@pytest.mark.parametrize("drifted", [0.5, -0.5])
def test_the_gradient_of_every_part_in_closed_form_on_both_sides_of_the_drift(drifted: float) -> None:
    algorithm, bowl = weit(sparsity=0.01, drift=3.0), Bowl(numbers(2.0, -1.0), 1.5)
    base, mask, adaptive = numbers(0.4, -0.6), numbers(0.3, -0.2), numbers(0.1, -0.2)
    old_mask, old, others, attention = numbers(1.0, -1.0), numbers(-0.3, 0.2), numbers(0.5, -0.4), 0.7
    m, old_m = mask.sigmoid(), old_mask.sigmoid()
    # Where the first task's rules were when it ended: B has drifted from there by so much in both rows.
    anchor = (base - drifted) * old_m + old
    state = {"task/a/mask/w": old_mask, "task/a/anchor/w": anchor, "now/others/w": others[None]}
    params = {"w": base, "now/mask/w": mask, "now/adaptive/w": adaptive, "now/attention/w": numbers(attention)}
    grads = algorithm.gradient({**params, "task/a/adaptive/w": old}, None, Message({}), state, bowl)
    data = 1.5 * (base * m + adaptive + attention * others - bowl.centre)
    pull = 3.0 * drifted * old_m
    expected = {
        "w": data * m + pull * old_m,
        "now/mask/w": data * base * m * (1 - m),
        "now/adaptive/w": data + 0.01 * adaptive.sign(),
        "now/attention/w": (data * others).sum()[None],
        "task/a/adaptive/w": pull + 0.01 * old.sign(),
    }
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-13, atol=1e-14)
    # Without drift the first task holds nothing, and its adaptive part feels its sparsity alone.
    free = weit(sparsity=0.01, drift=0.0).gradient({**params, "task/a/adaptive/w": old}, None, Message({}), state, bowl)
    assert torch.equal(free["task/a/adaptive/w"], 0.01 * old.sign())


def test_a_finished_task_moves_with_the_base_and_keeps_its_parts() -> None:
    algorithm, base = weit(), {"w": numbers(0.4, -0.6)}
    params = {"now/mask/w": numbers(0.3, 9.0), "now/adaptive/w": numbers(0.1, 0.2), "now/attention/w": numbers(0.5)}
    state = algorithm.boundary("a", {**base, **params}, {"now/others/w": numbers(1.0, -1.0)[None]}, Bowl(numbers(0.0)))
    assert not [name for name in state if name.startswith("now/")]
    moved = algorithm.answers({"w": base["w"] + 1}, state)
    assert torch.equal(moved["w"], base["w"] + 1)  # a task that is not finished and not begun: the base alone
    expected = (base["w"] + 1) * params["now/mask/w"].sigmoid() + params["now/adaptive/w"] + 0.5 * numbers(1.0, -1.0)
    torch.testing.assert_close(moved["a/w"], expected, rtol=1e-15, atol=0)
    # The next end of a task notes anew where all finished ones are, as the paper's drift is from task to task.
    again = algorithm.boundary("b", {"w": base["w"] + 1, "now/adaptive/w": numbers(0.0, 0.0), **_adaptive(state)},
                               state, Bowl(numbers(0.0)))  # fmt: skip
    torch.testing.assert_close(again["task/a/anchor/w"], state["task/a/anchor/w"] + params["now/mask/w"].sigmoid())


def _adaptive(state: Params) -> Params:
    return {name: tensor for name, tensor in state.items() if "/adaptive/" in name}


def test_rows_are_averaged_over_those_that_sent_them() -> None:
    start, params = numbers(1.0, 2.0, 3.0), {"w": numbers(1.0, 2.0, 3.0)}
    sent = {1.0: numbers(1, 1, 0), 3.0: numbers(1, 0, 0)}  # by weight
    rows = {1.0: numbers(5.0, 6.0, 3.0), 3.0: numbers(9.0, 2.0, 3.0)}  # what is not sent is as it was received
    mean = sum(weight * row for weight, row in rows.items()) / 4
    share = sum(weight * row for weight, row in sent.items()) / 4
    new, _ = weit().server_step(params, Message({"w": mean}, {"sent/w": share}, num_examples=4), {})
    torch.testing.assert_close(new["w"], numbers((5 + 27) / 4, 6.0, start[2]), rtol=1e-15, atol=0)
    dense, _ = weit().server_step(params, Message({"w": mean}, {"sent/w": share * 0 + 1}, num_examples=4), {})
    assert torch.equal(dense["w"], mean)


def test_a_client_leaves_out_its_lowest_rows_and_rows_that_are_alike_all_count() -> None:
    algorithm, received = weit(unsent=0.5), Message({"w": torch.zeros(4, 2, dtype=torch.float64)})
    rules = {"w": torch.ones(4, 2, dtype=torch.float64), "now/adaptive/w": torch.zeros(4, 2, dtype=torch.float64)}
    nan, alike = numbers(1, float("nan"), 2, 3), numbers(1, 1, 1, 1)
    for mask, counts in ((numbers(3, 1, 2, 0), numbers(1, 0, 1, 0)), (alike, alike), (nan, alike)):
        reply, _ = algorithm.finish({**rules, "now/mask/w": mask}, received, {}, Bowl(numbers(0.0)))
        assert torch.equal(reply.extra["sent/w"], counts)
        assert torch.equal(reply.params["w"], counts[:, None].expand(4, 2))


def test_adaptive_parts_travel_once_a_task_and_reach_every_other_client(tmp_path: Path) -> None:
    toy = stream(tmp_path / "r", task_rounds=2)
    toy.training = toy.training.model_copy(update={"rounds": 5})
    transport = toy.transport()
    toy.run(transport)
    replies = {(m.round, m.client): m for m in (Message.from_bytes(reply.payload) for reply in transport.returned)}
    names = {f"adaptive/{name}" for name in (WRITE, PROJECTION, GATE)}
    for (round, _), reply in replies.items():
        assert {name for name in reply.extra if name.startswith("adaptive/")} == (names if round in (2, 4) else set())
        assert {name for name in reply.extra if name.startswith("sent/")} == {f"sent/{n}" for n in start_params()}
    told = {(message.round, message.client): message.extra for message in transport.sent}
    for client in SIZES:
        assert told[1, client] == told[2, client] == told[4, client] == {}  # once, after the round that brought them
        for later, ended in ((3, 2), (5, 4)):
            for name in names:
                others = torch.stack([replies[ended, c].extra[name] for c in sorted(SIZES) if c != client])
                assert torch.equal(told[later, client][name], others)
    for client, state in transport.states().items():
        assert torch.equal(state[f"now/others/{WRITE}"], told[5, client][f"adaptive/{WRITE}"])
        assert bool(state[f"now/attention/{WRITE}"].any())  # the fifth round trained them
        assert {name.split("/")[1] for name in state if name.startswith("task/")} == {"task-2", "task-4"}
        assert not [name for name in state if name == "ended"]


def test_where_nothing_new_comes_a_client_goes_on_with_what_it_had_heard(tmp_path: Path) -> None:
    rounds = {"now": 0}

    def spoil(replies: list[Reply]) -> list[Reply]:
        rounds["now"] += 1
        return [forge(r, params={}) for r in replies] if rounds["now"] == 2 else replies

    toy = stream(tmp_path / "r")
    transport = toy.transport(spoil)
    toy.run(transport, stop_after=2)
    heard = transport.states()["ada"]
    assert not toy.rows()[1]["updated"]
    toy.run(transport)
    assert [bool(m.extra) for m in transport.sent] == [False] * 4 + [True] * 8  # sent again, as no reply was faultless
    message = Message({name: heard[f"heard/{name}"][0] for name in (WRITE, PROJECTION, GATE)})
    params, state = toy.algorithm.start(message, heard, None)  # type: ignore[arg-type]
    assert torch.equal(state[f"now/others/{WRITE}"], heard[f"heard/{WRITE}"])
    assert f"now/attention/{WRITE}" in params and not [name for name in state if name.startswith("heard/")]


def test_what_is_sent_to_others_has_no_number_below_the_sparsity(tmp_path: Path) -> None:
    toy = stream(tmp_path / "r", sparsity=0.2)
    toy.training = toy.training.model_copy(update={"rounds": 1})
    transport = toy.transport()
    toy.run(transport)
    whole = transport.states()["ada"][f"task/task-1/adaptive/{WRITE}"]
    sent = next(Message.from_bytes(r.payload) for r in transport.returned if r.client == "ada")
    pruned = sent.extra[f"adaptive/{WRITE}"]
    assert torch.equal(pruned, whole * (whole.abs() > 0.2))
    assert int((pruned == 0).sum()) > 0 and bool((whole != 0).all())


@pytest.mark.parametrize("new", [2.0, -2.0])
def test_training_on_a_new_task_ends_with_the_old_one_where_it_was_and_without_drift_elsewhere(new: float) -> None:
    bowl, start = Bowl(numbers(new)), {"w": numbers(0.5)}
    state = {"task/a/anchor/w": numbers(0.8), "task/a/adaptive/w": numbers(0.3)}  # 0.5 + 0.3

    def ends(drift: float) -> tuple[float, float]:
        algorithm = weit(sparsity=0.0, drift=drift, parts=("adaptive",), unsent=0.0)
        params, held = algorithm.start(Message(start), state, bowl)
        for _ in range(300):
            grads = algorithm.gradient(params, None, Message(start), held, bowl)
            params = {name: tensor - 0.05 * grads[name] for name, tensor in params.items()}
        rules = algorithm.answers(params, {**held, **params})
        return float(rules["w"]), float(rules["a/w"])

    assert ends(4.0) == pytest.approx((new, 0.8), abs=1e-9)
    # Base and adaptive part share the way equally, and the old task goes with the base.
    assert ends(0.0) == pytest.approx((new, 0.8 + (new - 0.5) / 2), abs=1e-9)


def test_a_stream_resumes_to_the_bit_with_what_the_server_keeps_of_each_client(tmp_path: Path) -> None:
    whole, parts = stream(tmp_path / "a"), stream(tmp_path / "b")
    in_parts(whole, parts, (1, 2))
    servers = [load_newest(toy.path / "checkpoints") for toy in (whole, parts)]
    assert servers[0] is not None and servers[1] is not None
    assert equal(servers[0].server_state, servers[1].server_state)
    assert len(servers[0].server_state) == len(SIZES) * len(start_params())


def test_half_an_adaptive_part_or_a_stray_name_is_refused_and_an_empty_client_has_none(tmp_path: Path) -> None:
    def spoil(replies: list[Reply]) -> list[Reply]:
        found = []
        for reply in replies:
            extra = Message.from_bytes(reply.payload).extra
            if reply.client == "ada":
                extra = {name: tensor for name, tensor in extra.items() if name != f"adaptive/{GATE}"}
            if reply.client == "cyd":
                extra = {**extra, "now/mask/w": torch.zeros(1, dtype=torch.float64)}
            found.append(forge(reply, extra=extra))
        return found

    toy = replace(stream(tmp_path / "r"), sizes={**SIZES, "bob": 0})
    toy.training = toy.training.model_copy(update={"rounds": 1})
    transport = toy.transport(spoil)
    toy.run(transport)
    assert toy.rows()[0]["refused"] == {"missing-name": 1, "unknown-name": 1}
    newest = load_newest(toy.path / "checkpoints")
    assert newest is not None
    assert {name.split("/")[1] for name in newest.server_state} == {"dan"}


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (Exchange(privacy=PrivacySettings(mode="central")), "needs more of single clients"),
        (Exchange(privacy=PrivacySettings(mode="local")), "needs more of single clients"),
        (Exchange(privacy=PrivacySettings(secure=True)), "needs more of single clients"),
        (Exchange(combine=CombineSettings(rule="median")), "sends more than rules"),
    ],
)
def test_sums_alone_and_robust_rules_are_refused(exchange: Exchange, words: str) -> None:
    from fednl.errors import SettingsError

    with pytest.raises(SettingsError, match=f'algorithm = "fedweit".*{words}'):
        check_exchange(exchange, FederationSettings(algorithm="fedweit"), FedWeIt.traits)


def test_without_tasks_parts_its_drift_is_a_pull_to_the_rules_at_the_last_tasks_end(tmp_path: Path) -> None:
    plain = Bench(tmp_path / "plain", algorithm=FedAvg(shared="all"), dtype=torch.float64).run()
    for drift, same in ((0.0, True), (5.0, False)):
        toy = stream(tmp_path / str(drift), parts=(), unsent=0.0, drift=drift)
        assert equal(toy.run(), plain) == same


def test_a_task_begins_with_an_optimiser_of_its_own() -> None:
    algorithm, bowl = weit(), Bowl(numbers(1.0, 2.0))
    message = Message({"w": numbers(0.5, -0.5)})
    state: Params = {}
    for ends, kept in (("", True), ("a", False), ("", True)):
        _, state = train_locally(algorithm, bowl, message, state, LocalPlan(1, 2, 0.05, ends=ends))
        assert bool([name for name in state if name.startswith("optimizer/")]) == kept
    assert float(state["optimizer/step"]) == 2.0


def test_a_combined_message_without_adaptive_parts_leaves_the_servers_as_they_are() -> None:
    params, kept = {"w": numbers(1.0)}, {"adaptive/ada/w": numbers(0.3)}
    same = Combined({"w": numbers(2.0)}, num_examples=1)
    assert equal(weit().server_step(params, same, kept)[1], kept)
    came = replace(same, apart={"bob": {"adaptive/w": numbers(0.7)}})
    new, state = weit().server_step(params, came, kept)
    assert equal(state, {**kept, "adaptive/bob/w": numbers(0.7)})
    assert new.keys() == params.keys()
    for client, others in (("eve", numbers(0.3, 0.7)), ("ada", numbers(0.7)), ("bob", numbers(0.3))):
        assert equal(weit().to_client(weit().once(state), client, state, 1), {"adaptive/w": others[:, None]})
    assert weit().to_client(weit().once(kept), "ada", kept, 1) == {}


def test_the_penalty_is_added_to_the_loss_once() -> None:
    algorithm, bowl = weit(sparsity=0.5), Bowl(numbers(0.0))
    params = {"w": numbers(1.0), "now/adaptive/w": numbers(-2.0)}
    loss, _ = value_and_gradient(lambda p: algorithm.penalty(p, Message({}), {}) + bowl.loss({}), params, [*params])
    assert float(loss) == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"parts": ["mask"], "unsent": 0.0},
        {"parts": ["adaptive"]},
        {"parts": ["adapter"]},
        {"unsent": 1.0},
        {"sparsity": -1.0},
        {"drift": float("inf")},
    ],
)
def test_refuses(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FedWeItSettings.model_validate(fields)


def test_in_a_stream_neither_the_order_of_clients_nor_of_replies_changes_a_bit(tmp_path: Path) -> None:
    toy, turned = stream(tmp_path / "a"), stream(tmp_path / "b")
    turned.sizes = dict(reversed(toy.sizes.items()))
    first, second = toy.transport(), turned.transport(lambda replies: [replies[number] for number in (2, 0, 3, 1)])
    assert equal(toy.run(first), turned.run(second))
    for client, state in first.states().items():
        assert equal(second.states()[client], state)


def test_a_diverged_client_is_refused_and_no_row_of_it_is_left_out_in_silence(tmp_path: Path) -> None:
    toy = stream(tmp_path / "r", task_rounds=0)
    toy.training = toy.training.model_copy(update={"rounds": 1})
    endpoint = toy.endpoint()

    def diverged(client: str, message: Message, *rest: Any) -> Any:
        bad = {name: tensor * float("nan") for name, tensor in message.params.items()}
        return endpoint(client, replace(message, params=bad) if client == "bob" else message, *rest)

    assert finite(toy.run(InProcessTransport(diverged, SIZES)))
    assert toy.rows()[0]["refused"] == {"non-finite": 1}


def test_every_rules_entries_stand_in_the_same_order_of_clients() -> None:
    names, clients = ("context.lambda", "layers.0.memory.gate.bias"), ("a", "a/d", "b")
    state = {f"adaptive/{c}/{n}": numbers(place) for n in names for place, c in enumerate(clients)}
    everybodys = weit().once(dict(sorted(state.items())))
    told = weit().to_client(everybodys, "c", state, 0)
    assert told.keys() == {f"adaptive/{name}" for name in names}
    assert all(torch.equal(told[f"adaptive/{name}"], numbers(0, 1, 2)[:, None]) for name in names)
    assert torch.equal(weit().to_client(everybodys, "a", state, 0)[f"adaptive/{names[0]}"], numbers(1, 2)[:, None])


def test_a_client_that_ends_a_task_late_takes_none_of_its_own_old_parts_for_anothers(tmp_path: Path) -> None:
    """By then it has trained its finished parts further, so they have other numbers than those it sent."""
    toy = stream(tmp_path / "r", task_rounds=2)
    toy.training = toy.training.model_copy(update={"rounds": 5})
    healthy = toy.endpoint()

    def endpoint(client: str, message: Message, state: Params, tell: Any) -> Any:
        if client == "ada" and message.round == 4:
            raise OSError("disk")
        return healthy(client, message, state, tell)

    transport = InProcessTransport(endpoint, SIZES)
    held = []
    for stop in (4, 5):
        toy.run(transport, stop_after=stop)
        newest = load_newest(toy.path / "checkpoints")
        assert newest is not None and len([n for n in newest.server_state if n.endswith(WRITE)]) == len(SIZES)
        held.append(newest.server_state)
    states = transport.states()
    assert {name.split("/")[1] for name in states["ada"] if name.startswith("task/")} == {"task-2", "task-4"}
    for client in SIZES:
        others = [held[0][f"adaptive/{other}/{WRITE}"] for other in sorted(SIZES) if other != client]
        assert torch.equal(states[client][f"now/others/{WRITE}"], torch.stack(others))
    # The part of the task that ended late goes to the server in that very round, for the tasks to come.
    late = states["ada"][f"task/task-4/adaptive/{WRITE}"]
    assert torch.equal(held[1][f"adaptive/ada/{WRITE}"], late * (late.abs() > 1e-4))


def adaptive_of(messages: list[Message], client: str) -> dict[int, torch.Tensor]:
    return {
        m.round: m.extra[f"adaptive/{WRITE}"]
        for m in messages
        if m.client == client and m.extra.get(f"adaptive/{WRITE}") is not None
    }


def test_a_failed_last_round_of_a_task_loses_nobodys_part(tmp_path: Path) -> None:
    """ada foresees its end a round early; the task's last round, the third, then has no quorum."""
    toy = stream(tmp_path / "r")
    toy.settings = FederationSettings(quorum=len(SIZES))
    toy.training = toy.training.model_copy(update={"rounds": 7})

    def endpoint(client: str, message: Message, state: Params, tell: Any) -> Any:
        left, problem = -message.round % 3, Regression(client, SIZES[client], message.round, 4, dtype=torch.float64)
        task = f"task-{message.round + left}"
        ends = task if left < (2 if client == "ada" else 1) else ""
        plan = LocalPlan.of(toy.training, message.round, task, ends, final=not left)
        return train_locally(toy.algorithm, problem, message, state, plan)

    def lose(replies: list[Reply]) -> list[Reply]:
        third = Message.from_bytes(replies[0].payload).round == 3
        return [Reply(r.client, status="lost") if third and r.client == "dan" else r for r in replies]

    transport = Tampered(endpoint, SIZES, lose)
    toy.run(transport)
    assert [row["updated"] for row in toy.rows()] == [True, True, False, True, True, True, True]
    came = [Message.from_bytes(reply.payload) for reply in transport.returned if reply.payload]
    # Sent until a round has counted it: the third changed nothing, the fourth did.
    assert [*adaptive_of(came, "bob")] == [*adaptive_of(came, "cyd")] == [3, 4, 6]
    assert [*adaptive_of(came, "dan")] == [4, 6] and [*adaptive_of(came, "ada")] == [2, 3, 4, 5, 6]
    # What was sent amid a task is kept for the next one: bob and cyd were sent ada's part in the third round.
    assert [*adaptive_of(transport.sent, "bob")] == [*adaptive_of(transport.sent, "cyd")] == [3, 5, 6, 7]
    assert [*adaptive_of(transport.sent, "dan")] == [3, 4, 5, 6, 7]
    states = transport.states()
    for client in SIZES:
        assert (f"task/task-6/borrowed/{WRITE}" in states[client]) == (client != "ada")  # nobody else's was there
        others = [adaptive_of(came, other)[6] for other in sorted(SIZES) if other != client]
        assert torch.equal(states[client][f"now/others/{WRITE}"], torch.stack(others))


def test_who_has_no_examples_of_a_task_is_sent_others_parts_until_it_trains(tmp_path: Path) -> None:
    toy = stream(tmp_path / "r")

    def endpoint(client: str, message: Message, state: Params, tell: Any) -> Any:
        size = 0 if (client, message.round) == ("bob", 2) else SIZES[client]
        problem = Regression(client, size, message.round, 4, dtype=torch.float64)
        task = f"task-{message.round}" if message.round < 3 else "task-4"
        plan = LocalPlan.of(toy.training, message.round, task, task if message.round < 3 else "")
        return train_locally(toy.algorithm, problem, message, state, plan)

    def late(replies: list[Reply]) -> list[Reply]:  # no reply of round 2 counts, so that it brings nothing new
        second = Message.from_bytes(replies[0].payload).round == 2
        return [forge(r, params={}) if second and r.client != "bob" else r for r in replies]

    transport = Tampered(endpoint, SIZES, late)
    toy.run(transport)
    assert [*adaptive_of(transport.sent, "bob")] == [2, 3]
    assert len(transport.states()["bob"][f"now/others/{WRITE}"]) == len(SIZES) - 1


def test_of_others_parts_the_newest_that_came_amid_a_task_are_for_the_next() -> None:
    algorithm, bowl, base = weit(), Bowl(numbers(1.0)), {"w": numbers(0.5)}
    state: Params = {}
    for round, (came, ends) in enumerate([(1.0, ""), (2.0, ""), (None, "a"), (None, "")], 1):
        extra = {} if came is None else {"adaptive/w": numbers(came)[None]}
        _, state = train_locally(
            algorithm, bowl, Message(base, extra, round=round), state, LocalPlan(round, 1, 0.1, ends=ends)
        )
    assert torch.equal(state["now/others/w"], numbers(2.0)[None])
    assert not [name for name in state if name.startswith("heard/")]


def test_a_finished_part_is_sent_until_the_server_says_that_it_counted() -> None:
    algorithm, bowl, base = weit(sparsity=0.0), Bowl(numbers(1.0)), {"w": numbers(0.5)}
    state: Params = {}
    sent = {}
    for round, counted in enumerate([0, 0, 2, 2, 4, 4], 1):  # the task ends in round 3, whose reply does not count
        message = Message(base, {}, round=round, counted=counted)
        reply, state = train_locally(algorithm, bowl, message, state, LocalPlan(round, 1, 0.1, ends="a" * (round == 3)))
        sent[round] = "adaptive/w" in reply.extra
    assert sent == {1: False, 2: False, 3: True, 4: True, 5: False, 6: False}
    assert not [name for name in state if name.startswith("owed/")]
