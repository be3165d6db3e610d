"""How a run begins, and how it is taken up again from its newest good checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fednl.errors import CheckpointError
from fednl.federation.accounting import Spent, begin_privacy, spent_epsilon
from fednl.federation.attempts import NAME, Asked
from fednl.federation.checkpoint import Checkpoint, drop_after, load_newest, load_round, round_of, write_tensors
from fednl.federation.identity import identity
from fednl.federation.lora_ranks import of_own_rank, offered
from fednl.federation.params import ClientState, Params, copy
from fednl.federation.quarantine import Conduct
from fednl.federation.record import Federation, Point, header_of, write_final
from fednl.files import writing


def begin(fed: Federation, params: Params) -> Point:
    """A fresh start: every client holds the start values of what is private to it, of its own rank."""
    fed.run.truncate_jsonl(fed.inside("rounds.jsonl"), 0)
    private = sorted(set(params) - set(fed.names) - set(fed.algorithm.given(params)))
    states = {}
    for client in fed.transport.clients():
        own = offered(fed.algorithm, params, client, fed.settings.lora_ranks)
        states[client] = copy({f"private/{name}": own[name] for name in private})
    fed.transport.restore(states)
    spent = begin_privacy(fed.exchange.privacy, len(fed.transport.clients()), fed.folder)
    return Point(0, copy(params), fed.algorithm.opening(params), spent=spent)


def resume(fed: Federation, params: Params) -> Point | None:
    """The newest good checkpoint, with everything put back to where it stood; None if there is none.

    Of a run that ended in an error, the rounds that failed are taken back, as far as there are checkpoints; what they
    have spent of a privacy budget stays spent. Done again, they draw clients and noise anew. The attempt that begins is
    noted before anything of the earlier one goes, and each step after it can be taken again, so that a crash at any
    moment leads back to the same point.
    """
    noted = Asked.read(fed.run, fed.inside(NAME))
    newest = load_newest(fed.path("checkpoints"), noted.begun)
    if newest is None:
        if (fed.run.path / fed.inside("rounds.jsonl")).exists():
            fed.tell("note", text="no checkpoint is left, so the rounds begin again with the first")
        if not noted.round:
            return None
        spent, checkpoint = begin_privacy(fed.exchange.privacy, len(fed.transport.clients()), fed.folder), None
    else:
        _check_same(fed, newest, params)
        spent = Spent.from_dict(newest.state["spent"]) if "spent" in newest.state else None
        checkpoint = _before_failures(fed, newest)
    done = 0 if checkpoint is None else checkpoint.round
    if newest is not None and done < newest.round:
        fed.tell("note", text=f"rounds {done + 1} to {newest.round} changed nothing, so they are done again")
    begun, spent = _attempt(noted, newest, done, spent)
    if begun and begun != noted.begun:
        counts = None if spent is None else spent.to_dict()
        Asked(done + 1, begun, counts, counts).write(fed.run, fed.inside(NAME))
    if checkpoint is None:
        stands = replace(begin(fed, params), spent=spent, begun=begun)
    else:
        stands = _restore(fed, params, checkpoint, spent, begun)
    return _take_back(fed, stands, () if newest is None or begun != noted.begun else newest.skipped)


def note_question(fed: Federation, point: Point, after: Spent) -> None:
    """Notes what a round's question costs, before it leaves.

    Args:
        fed: the federation.
        point: where the run stands before the round, under noise.
        after: what will have been spent.
    """
    before = None if point.spent is None else point.spent.to_dict()
    Asked(point.round + 1, point.begun, before, after.to_dict()).write(fed.run, fed.inside(NAME))


def _attempt(
    noted: Asked, newest: Checkpoint | None, done: int, spent: Spent | None
) -> tuple[tuple[int, ...], Spent | None]:
    """Where each attempt began, and what is spent, when a run goes on after round `done`."""
    begun = noted.begun
    if newest is not None:
        known = tuple(newest.state.get("begun", ()))
        known += (newest.round + 1,) * (int(newest.state.get("attempt", 0)) - len(known))  # of an earlier version
        begun = max(begun, known + (done + 1,) * (done < newest.round), key=len)
    if spent is not None:
        next = (len(begun), done + 1)
        if noted.question > next or (noted.question == next and newest is not None and newest.skipped):
            # More was asked than the checkpoints show, so the same rounds are asked, and counted, once more.
            begun, spent = (*begun, done + 1), spent.at_least(noted.after)
        elif noted.question == next:  # the question that a crash cut short: it is sent, and counted, once
            # With the secret and the clip that it had: a checkpoint that is gone may have held them.
            spent = Spent.from_dict({**spent.to_dict(), **(noted.before or {})}).at_least(spent.to_dict())
    return (*begun[:-1], min(begun[-1], done + 1)) if begun else (), spent


def _take_back(fed: Federation, stands: Point, damaged: Collection[str]) -> Point:
    """Leaves nothing on disk of rounds after the one that a run goes on from, but for checkpoints found damaged."""
    best = fed.path("best") / "params.safetensors"
    if round_of(best) > stands.round:
        try:
            of = load_round(fed.path("checkpoints"), int(stands.best.get("round", 0)))
            write_tensors(best, of.params, header_of(of.round, _updates(of)))
        except CheckpointError:  # no round was the best one yet, or an earlier version did not keep its checkpoint
            stands = replace(stands, best={})
            with writing(best):
                best.unlink()
    if stands.round and round_of(fed.path("final") / "params.safetensors") > stands.round:
        write_final(fed, stands)
    with writing(checkpoints := fed.path("checkpoints")):
        drop_after(checkpoints, stands.round, damaged)
    return stands


def _check_same(fed: Federation, checkpoint: Checkpoint, params: Params) -> None:
    """Refuses checkpoints of another run than this one."""
    folder, now = fed.path("checkpoints"), identity(fed)
    # Checkpoints from before there was a quarantine go on under today's.
    then = {"quarantine": now["quarantine"], **checkpoint.state["identity"]}
    for key in {**then, **now}:
        if then.get(key) != now.get(key):
            raise CheckpointError(
                f"The checkpoints in {folder} have {key} = {then.get(key)}, not {now.get(key)}: resume with "
                "the settings of that run, or start a new one."
            )
    if checkpoint.round > fed.training.rounds:
        raise CheckpointError(
            f"The checkpoints in {folder} have {checkpoint.round} rounds, and training.rounds = {fed.training.rounds}: "
            f"set it to at least {checkpoint.round}, or start a new run."
        )
    if _layout(checkpoint.params) != _layout(params):
        raise CheckpointError(f"The checkpoints in {folder} hold other rules than this model has: start anew.")
    if checkpoint.skipped:
        fed.tell("note", text=f"damaged and left out: {', '.join(checkpoint.skipped)} in {folder}")


def _restore(
    fed: Federation, params: Params, checkpoint: Checkpoint, spent: Spent | None, begun: tuple[int, ...]
) -> Point:
    """Puts clients and rows back to where they stood, and gives that point."""
    fed.transport.restore(_of_own_ranks(fed, params, checkpoint.client_states))
    left = fed.run.truncate_jsonl(fed.inside("rounds.jsonl"), checkpoint.round)
    if left < checkpoint.round:
        fed.tell("note", text=f"{checkpoint.round - left} of {checkpoint.round} rounds are missing in rounds.jsonl")
    if spent is not None:
        _show_spent(fed, spent)
    state = checkpoint.state
    return Point(
        checkpoint.round,
        checkpoint.params,
        checkpoint.server_state,
        state["best"],
        state["failed_rounds"],
        Conduct(**state.get("conduct", {})),
        spent,
        tuple(state.get("told", ())),
        _updates(checkpoint),
        begun,
        state["counted"] if "counted" in state else _counted(fed),
        _sound(checkpoint),
        int(state.get("best_then", state["best"].get("round", 0))),
    )


def _show_spent(fed: Federation, spent: Spent) -> None:
    """Lets the last row that is left say what is spent: the rows that showed more are of rounds that are taken back."""
    name, epsilon = fed.inside("rounds.jsonl"), spent_epsilon(fed.exchange.privacy, spent)
    rows = fed.run.read_jsonl(name)
    if rows and rows[-1].get("metrics", {}).get("epsilon", epsilon) < epsilon:
        rows[-1]["metrics"]["epsilon"] = epsilon
        fed.run.write_text(name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _of_own_ranks(fed: Federation, params: Params, states: dict[str, ClientState]) -> dict[str, ClientState]:
    """Clients' states of their own ranks; in older checkpoints, private LoRA factors have the server's."""
    found = {}
    for client, state in states.items():
        own = offered(fed.algorithm, params, client, fed.settings.lora_ranks)
        found[client], large = of_own_rank(own, state)
        if large:
            text = (
                f'of client "{client}", {len(large)} private LoRA factors have a higher rank than lora-ranks says, as '
            )
            text += "earlier versions began with: they go on with their first components"
            fed.tell("note", text=text)
    return found


def _before_failures(fed: Federation, newest: Checkpoint) -> Checkpoint | None:
    """Where to go on: before the failures that ended the run, else after the newest round; None for the very start."""
    back = _sound(newest)
    if newest.round == fed.training.rounds and not _updates(newest):
        back = 0
    elif newest.state["failed_rounds"] < fed.settings.max_failed_rounds:
        return newest
    try:
        return load_round(fed.path("checkpoints"), back) if back else None
    except CheckpointError:  # an earlier version kept none that old
        return newest


def _updates(checkpoint: Checkpoint) -> int:
    """How many rounds changed the rules; checkpoints from before these were counted know failed rounds only."""
    return int(checkpoint.state.get("updates", checkpoint.round - checkpoint.state["failed_rounds"]))


def _counted(fed: Federation) -> dict[str, int]:
    """Whose replies counted last in which round, for checkpoints from before that was in them."""
    rows = [row for row in fed.run.read_jsonl(fed.inside("rounds.jsonl")) if row["updated"]]
    return {one["name"]: row["round"] for row in rows for one in row["clients"] if one["status"] == "ok"}


def _sound(checkpoint: Checkpoint) -> int:
    """The last round before those that failed; in older checkpoints these follow one another."""
    return int(checkpoint.state.get("sound", checkpoint.round - checkpoint.state["failed_rounds"]))


def _layout(params: Params) -> dict[str, tuple[Any, Any]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in params.items()}
