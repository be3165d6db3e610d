"""How a run begins, and how it is taken up again from its newest good checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fednl.errors import CheckpointError
from fednl.federation.accounting import Spent, begin_privacy
from fednl.federation.checkpoint import Checkpoint, load_newest, load_round
from fednl.federation.identity import identity
from fednl.federation.lora_ranks import of_own_rank, offered
from fednl.federation.params import ClientState, Params, copy
from fednl.federation.quarantine import Conduct
from fednl.federation.record import Federation, Point, write_final


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
    have spent of a privacy budget stays spent. Done again, they draw clients and noise anew.
    """
    folder = fed.path("checkpoints")
    checkpoint = load_newest(folder)
    if checkpoint is None:
        if (fed.run.path / fed.inside("rounds.jsonl")).exists():
            fed.tell("note", text="no checkpoint is left, so the rounds begin again with the first")
        return None
    now = identity(fed)
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
    spent = Spent.from_dict(checkpoint.state["spent"]) if "spent" in checkpoint.state else None
    newest, attempt = checkpoint.round, int(checkpoint.state.get("attempt", 0))
    checkpoint = _before_failures(fed, checkpoint)
    done = 0 if checkpoint is None else checkpoint.round
    if done < newest:
        attempt += 1
        fed.tell("note", text=f"rounds {done + 1} to {newest} changed nothing, so they are done again")
    if checkpoint is None:
        return replace(begin(fed, params), spent=spent, attempt=attempt)
    fed.transport.restore(_of_own_ranks(fed, params, checkpoint.client_states))
    left = fed.run.truncate_jsonl(fed.inside("rounds.jsonl"), checkpoint.round)
    if left < checkpoint.round:
        fed.tell("note", text=f"{checkpoint.round - left} of {checkpoint.round} rounds are missing in rounds.jsonl")
    state = checkpoint.state
    stands = Point(
        checkpoint.round,
        checkpoint.params,
        checkpoint.server_state,
        state["best"],
        state["failed_rounds"],
        Conduct(**state.get("conduct", {})),
        spent,
        tuple(state.get("told", ())),
        _updates(checkpoint),
        attempt,
        state["counted"] if "counted" in state else _counted(fed),
        _sound(checkpoint),
    )
    if done < newest:
        write_final(fed, stands)  # it was of a round that is taken back
    return stands


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
