"""Questions met with the rules they are to be answered with: the client's, or those it has for the question's task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.scoring import score_candidates
from fednl.federation.params import Params

Put = Callable[[Params], Any]


def with_their_rules(examples: Sequence[Any], params: Params, put: Put) -> Iterator[list[int]]:
    """Puts rules onto the model, and gives the places of the questions that they answer; set after set.

    Args:
        examples: questions, each with the name of its `task`.
        params: rules as `fednl.federation.algorithms.FedAvg.answers` gives them: `NAME`, and `TASK/NAME` where a
            task's questions have others; none leaves the model as it is.
        put: takes rules by canonical name.
    """
    plain = {name: tensor for name, tensor in params.items() if "/" not in name}
    own: dict[str, Params] = {}
    for key, tensor in params.items():
        task, slash, name = key.partition("/")
        if slash:
            own.setdefault(task, {})[name] = tensor
    places: dict[str, list[int]] = {}
    for place, example in enumerate(examples):
        places.setdefault(example.task if example.task in own else "", []).append(place)
    for task, found in places.items():
        if params:
            put({**plain, **own.get(task, {})})
        yield found


def answer(
    model: Any,
    examples: Sequence[Any],
    params: Params,
    put: Put,
    on_scored: Callable[[int], None] | None = None,
    **named: Any,
) -> list[Outcome]:
    """Answers questions, each with the rules it is to be answered with.

    Args:
        model: the model that `put` changes.
        examples: as in `with_their_rules`.
        params: as there.
        put: as there.
        on_scored: is told how many are answered so far.
        named: goes to `fednl.evaluation.scoring.score_candidates`.

    Returns:
        One outcome per question, in the same order.

    Raises:
        NonFiniteError: as `score_candidates`.
    """
    found: dict[int, Outcome] = {}
    for places in with_their_rules(examples, params, put):
        before = len(found)

        def tell(done: int, before: int = before) -> None:
            if on_scored is not None:
                on_scored(before + done)

        group = [examples[place] for place in places]
        found.update(zip(places, score_candidates(model, group, on_scored=tell, **named), strict=True))
    return [found[place] for place in range(len(examples))]
