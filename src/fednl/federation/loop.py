"""The one round loop: sample clients, ask, validate, combine, step, save; the same over every transport."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fednl.errors import DataError, FednlError, Interrupted, SettingsError
from fednl.federation.accounting import spent_epsilon
from fednl.federation.algorithms.fedavg import FedAvg
from fednl.federation.apart import Apart, Combined
from fednl.federation.budget import budget_is_spent, private_round
from fednl.federation.checkpoint import round_of
from fednl.federation.combine import NO_EXAMPLES, WITHHELD, Combiner, InOrder
from fednl.federation.exchange import PLAIN, Exchange, check_exchange
from fednl.federation.groups import check_shared
from fednl.federation.ledger import Ledger
from fednl.federation.letters import Letters, message_of, tell_sizes, told_after
from fednl.federation.lora_combine import LoraCombiner
from fednl.federation.lora_ranks import Ranks, check_ranks
from fednl.federation.masked_round import MaskedMean, MaskedRound
from fednl.federation.message import Message
from fednl.federation.params import Params, finite
from fednl.federation.privacy import PrivateSum
from fednl.federation.record import Federation, OnEvent, Point, Validate, save, write_final
from fednl.federation.resuming import begin, note_question, resume
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.steps import Steps
from fednl.federation.transport import Transport
from fednl.runs import Run
from fednl.seeding import anew, seed_of


def run_rounds(
    algorithm: FedAvg,
    transport: Transport,
    params: Params,
    settings: FederationSettings,
    training: TrainingSettings,
    run: Run,
    *,
    folder: str = "",
    seed: int,
    on_event: OnEvent = lambda event: None,
    validate_round: Validate | None = None,
    milestones: Collection[int] = (),
    stop_after: int | None = None,
    exchange: Exchange = PLAIN,
    adapters: str = "",
    by_task: Mapping[str, Mapping[str, int]] | None = None,
) -> Params:
    """Trains rules over many clients, and leaves every finished round on disk.

    If the folder holds checkpoints of this run, it goes on after the newest good one, and ends with the same
    bits as if it had never stopped; of a run that ended as rounds failed, after the newest round that did not fail.
    Rounds are counted from 1.

    Args:
        algorithm: how rules are trained and merged.
        transport: how clients are reached; not closed here.
        params: the start values of all rules, also of those that stay private. Not modified.
        settings: who is asked, what travels, when a round counts.
        training: rounds and local steps.
        run: the run's folder.
        folder: a folder inside it for one arm of a comparison; empty for the run itself.
        seed: the run's seed.
        on_event: is told `round-start`, `step`, `client-done`, `round-end` and `note`, with `round` of
            `rounds`; `done` of `total` counts local steps of the run in `step`, and clients elsewhere.
        validate_round: measures (round, all rules) after each round; the lowest `"loss"` makes `best/`.
        milestones: rounds whose checkpoints stay, such as the last of each task; the best round's stays always.
        stop_after: the last round of this sitting; None for all.
        exchange: how updates travel and how they become one.
        adapters: a hash of all that makes rules comparable but is not in them; a client with another takes no part.
        by_task: of a stream, by task, each client's training examples of it, as a round is of one task.

    Returns:
        All rules after the last round done; private ones as they started. A client's own are in
        `transport.states()`, see `fednl.federation.params.personal`.

    Raises:
        SettingsError: `shared` matches nothing, more clients are asked for than there are, no client has as many
            examples (of a task) as sharing needs, parts of `exchange` do not fit together, or its first round would
            spend more than the budget.
        DataError: no client has an example.
        CheckpointError: the checkpoints are damaged, or come from other settings.
        FednlError: too many rounds in a row failed, or no round changed the rules.
        Interrupted: Ctrl-C; the finished rounds are saved.

    Source: McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1; validation, quorum and checkpoints are ours.
    """
    names = _check_start(algorithm, transport, params, settings)
    asked = settings.clients_per_round or len(transport.clients())
    check_exchange(exchange, settings, algorithm.traits, asked)
    _check_enough(transport, by_task or {}, "privacy", exchange.privacy.min_examples)
    if algorithm.given(params) and not algorithm.made(algorithm.opening(params)):
        _check_enough(transport, by_task or {}, settings.algorithm, getattr(algorithm.settings, "min_examples", 1))
    fed = Federation(
        algorithm,
        transport,
        settings,
        training,
        run,
        folder,
        seed,
        on_event,
        validate_round,
        names,
        asked,
        milestones,
        exchange=exchange,
        adapters=adapters,
    )
    point = resume(fed, params) or begin(fed, params)
    fed = replace(fed, first_round=point.round + 1, final_round=round_of(fed.path("final") / "params.safetensors"))
    tell_sizes(fed, point)
    last = min(training.rounds, training.rounds if stop_after is None else stop_after)
    try:
        while point.round < last and not budget_is_spent(fed, point):
            point = _one_round(fed, point)
    except KeyboardInterrupt:
        write_final(fed, point)
        raise Interrupted(
            f"Stopped in round {point.round + 1} of {training.rounds}; {point.round} rounds are saved: "
            f"go on with `fednl train --resume {run.path}`."
        ) from None
    write_final(fed, point)
    if point.round and not point.updates:
        raise FednlError(
            f"None of the {point.round} rounds changed the rules: rounds.jsonl in {run.path} says why for each "
            "round and each client."
        )
    return point.params


def sample_clients(clients: Sequence[str], number: int, seed: int, round: int, attempt: int = 0) -> list[str]:
    """Draws who is asked in a round, by stable name: a client more or less does not reshuffle the others.

    Args:
        clients: all names, in any order.
        number: how many; 0 for all.
        seed: the run's seed.
        round: counted from 1.
        attempt: how often the run went back behind rounds that failed; each time others are drawn.

    Returns:
        The names, sorted.
    """
    if number == 0 or number >= len(clients):
        return sorted(clients)
    purpose = anew("sampling", attempt)
    return sorted(sorted(clients, key=lambda client: seed_of(seed, purpose, client, round))[:number])


def _one_round(fed: Federation, point: Point) -> Point:
    """A round of Algorithm 1: w goes out, each w_k comes back, the server makes the new w of their mean."""
    started_s, number = time.perf_counter(), point.round + 1
    free = point.conduct.free(fed.transport.clients(), number)
    asked = sample_clients(free, fed.settings.clients_per_round, fed.seed, number, point.attempt)
    private = private_round(fed, point)
    if private is not None:
        asked = private.draw(free, asked)
        note_question(fed, point, private.asking(asked))
    message = message_of(fed, point)
    shared = message.params
    combiner = _combiner(fed, shared, None if private is None else private.sum)
    ledger = _ask(fed, point, message, asked, combiner)
    params, server_state = point.params, point.server_state
    numbers, spent = combiner.facts(), None
    if private is not None:
        spent = private.after(asked)
        numbers["epsilon"] = spent_epsilon(fed.exchange.privacy, spent)
    reason = ledger.why_no_quorum(fed.settings.quorum, _why_few(fed, free, asked)) or combiner.fault()
    news = False
    reason = WITHHELD if reason == NO_EXAMPLES and ledger.withheld() else reason
    if not reason:
        combined = replace(combiner.result(), round=number)
        update, new_state = fed.algorithm.server_step(shared, combined, point.server_state)
        if finite(update) and finite(new_state):
            params, server_state = {**params, **update}, new_state
            news = isinstance(combined, Combined) and bool(combined.apart)
            numbers |= fed.algorithm.measure(shared, combined, update, combiner.products())
        else:
            reason = "the server's step gave NaN or infinity, so it was not taken"
    # A round in which nobody had anything to learn from has not failed, and mends nothing that failed before it.
    fails = reason not in ("", NO_EXAMPLES, WITHHELD)
    failed = point.failed_rounds * bool(reason) + fails
    after = replace(
        point,
        round=number,
        params=params,
        server_state=server_state,
        failed_rounds=failed,
        sound=point.sound if failed else number,
        updates=point.updates + (not reason),
        conduct=point.conduct.after(ledger.rows(), number, fed.settings),
        told=told_after(fed, point, ledger, news),
        counted=point.counted if reason else {**point.counted, **dict.fromkeys(ledger.counted(), number)},
        spent=spent,
    )
    after = save(fed, after, ledger, reason, numbers, time.perf_counter() - started_s)
    if fails and failed >= fed.settings.max_failed_rounds:
        write_final(fed, after)
        raise FednlError(f"{failed} rounds in a row failed, the last as {reason}; mend that, then resume.")
    return after


def _why_few(fed: Federation, free: Sequence[str], asked: Sequence[str]) -> str:
    """Says why no more clients were asked in a round than those that were."""
    out = len(fed.transport.clients()) - len(free)
    coins = f"the coins of central noise drew {len(asked)} of {len(free)} clients" if len(asked) < len(free) else ""
    return " and ".join(filter(None, [coins, f"{out} clients are in quarantine" if out else ""]))


def _combiner(
    fed: Federation, shared: Params, noise: PrivateSum | None
) -> LoraCombiner | Apart | PrivateSum | MaskedMean:
    """What a round's replies are handed to: single updates, or only their sum."""
    if fed.exchange.privacy.secure:
        return MaskedMean(shared, noise)
    if noise is not None:
        return noise.starting_from(shared)
    ranks = Ranks(fed.settings.lora_ranks).all
    combiner = LoraCombiner(fed.algorithm, fed.exchange.combine, shared, fed.asked_per_round, ranks)
    return Apart(fed.algorithm, combiner) if fed.algorithm.apart(fed.algorithm.extra(shared)) else combiner


def _ask(fed: Federation, point: Point, message: Message, asked: list[str], combiner: Combiner | MaskedMean) -> Ledger:
    """Sends the server's message out, and hands what comes back to the combiner in the order of names."""
    number = message.round
    progress = Steps(fed, number, asked)
    fed.tell("round-start", round=number, rounds=fed.training.rounds, clients=asked, total=len(asked))
    if isinstance(combiner, MaskedMean):
        masked = MaskedRound(fed, message, _deadline_s(fed, number))
        return masked.run(asked, combiner, progress.step, progress.client_done)
    letters = Letters(fed, point, message)
    down_bytes, tensor_bytes, wanted = {}, {}, {}
    for client in asked:
        sent, wanted[client] = letters.to(client)
        down_bytes[client], tensor_bytes[client] = fed.transport.send(client, sent), sent.tensor_bytes
    ledger = Ledger(wanted, down_bytes, tensor_bytes)
    queue = InOrder(asked)
    for reply in fed.transport.replies(_deadline_s(fed, number), progress.step):
        verdict = ledger.judge(reply)
        if verdict.is_final:
            for due in queue.put(verdict.client, verdict.message):
                combiner.add(due)
            progress.client_done(verdict.client, ledger)
    for due in queue.rest():
        combiner.add(due)
    return ledger


def _check_start(
    algorithm: FedAvg, transport: Transport, params: Params, settings: FederationSettings
) -> tuple[str, ...]:
    """What must hold before the first round; gives the names that travel."""
    clients = transport.clients()
    names = check_shared(algorithm, params)
    examples = transport.examples()
    if not clients or (len(examples) == len(clients) and not any(examples.values())):
        who = f"None of the {len(clients)} clients has a training example" if clients else "No client takes part"
        raise DataError(f"{who}: check [data] and its files.")
    for key, number in (("clients-per-round", settings.clients_per_round), ("quorum", settings.quorum)):
        if number > len(clients):
            raise SettingsError(f"[federation] {key} = {number}, but there are {len(clients)} clients: lower it.")
    check_ranks(algorithm, {name: params[name] for name in names}, params, settings.lora_ranks, clients)
    return names


def _check_enough(transport: Transport, by_task: Mapping[str, Mapping[str, int]], section: str, fewest: int) -> None:
    """Refuses a floor that no client reaches, in a stream with its examples of one task, where these are known."""
    for task, examples in by_task.items() or [("", transport.examples())]:
        largest, of = max(examples.values(), default=0), f' of the task "{task}"' if task else ""
        if len(examples) == len(transport.clients()) and largest < fewest > 1:
            raise SettingsError(
                f"[{section}] min-examples = {fewest}, but the largest of the {len(examples)} clients has {largest} "
                f"training examples{of}, so none would share anything: lower it, or give clients more."
            )


def _deadline_s(fed: Federation, number: int) -> float | None:
    """Seconds that a client has; clients load their models in the first of a sitting, not in every first round."""
    return fed.settings.seconds_to_wait(first=number == fed.first_round)
