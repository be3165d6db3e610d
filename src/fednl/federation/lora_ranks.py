"""Clients whose LoRA has a lower rank than the server's: who has which, and what each gets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fednl.errors import SettingsError
from fednl.federation.lora_products import pairs
from fednl.federation.params import ClientState, Params

if TYPE_CHECKING:
    from fednl.federation.algorithms.fedavg import FedAvg


class Ranks:
    """The policy of `[federation] lora-ranks`: the first pattern that fits a client's name says its rank.

    Args:
        entries: `"PATTERN=RANK"` each; a client that none fits has the rank of the server.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        self._policy = [(pattern, int(rank)) for pattern, _, rank in (entry.rpartition("=") for entry in entries)]

    @property
    def all(self) -> list[int]:
        """Every rank that it gives to some client."""
        return [rank for _, rank in self._policy]

    def of(self, client: str) -> int | None:
        """Gives a client's rank; None for that of the server."""
        return next((rank for pattern, rank in self._policy if fnmatchcase(client, pattern)), None)


def check_ranks(
    algorithm: FedAvg, shared: Params, params: Params, entries: Sequence[str], clients: Sequence[str]
) -> None:
    """Refuses an algorithm, or ranks, for LoRA factors that do not travel as they would have to.

    Args:
        algorithm: whose traits count.
        shared: what travels.
        params: all that is trained.
        entries: `[federation] lora-ranks`.
        clients: all names; a pattern that fits none is refused, as a misspelt one would change nothing.

    Raises:
        SettingsError: the factors that the algorithm averages do not travel, or a pattern fits nobody.
    """
    name = type(algorithm).__name__
    traits, out = algorithm.traits, f"[federation] shared = {json.dumps(algorithm.lets_out)}"
    if traits.averages_products and not pairs(shared):
        raise SettingsError(
            f'{out} lets no pair of LoRA factors out, of which {name} averages the products; add "lora", or choose '
            "another algorithm."
        )
    if traits.needs_lora and all(rank_axis(one) is None for one in shared):
        raise SettingsError(
            f"{out} lets no LoRA factor out, of which {name} averages B: every client would train one of its own; add "
            '"lora", or choose another algorithm.'
        )
    for entry in entries:
        pattern = entry.rpartition("=")[0]
        if not any(fnmatchcase(client, pattern) for client in clients):
            raise SettingsError(
                f'[federation] lora-ranks names "{entry}", but no client has such a name; the clients are '
                f"{', '.join(clients)}."
            )
    factors = [name for name in params if rank_axis(name) is not None]
    if entries and traits.shares and factors and not any(name in shared for name in factors):
        raise SettingsError('[federation] lora-ranks is set, but shared lets no LoRA factor out: add "lora" to it.')


def offered(algorithm: FedAvg, params: Params, client: str, entries: Sequence[str]) -> Params:
    """Gives all rules as a client begins with them, of its own rank: those it is sent, and those it keeps to itself.

    Args:
        algorithm: whose `offer` says what a client of a rank has.
        params: all rules, as the server has them; not copied.
        client: its name.
        entries: `[federation] lora-ranks`.
    """
    return algorithm.offer(params, Ranks(entries).of(client))


def rules_by_client(
    algorithm: FedAvg,
    params: Params,
    states: Mapping[str, ClientState],
    clients: Iterable[str],
    entries: Sequence[str],
) -> dict[str, Params]:
    """Gives the rules that each client answers with: what it would be sent, and what it keeps to itself.

    Args:
        algorithm: whose rules they are.
        params: all rules, as the server has them.
        states: the clients' states, as far as they have any.
        clients: who answers, those who did not train too.
        entries: `[federation] lora-ranks`.
    """
    return {
        client: algorithm.answers(offered(algorithm, params, client, entries), states.get(client, {}))
        for client in clients
    }


def of_own_rank(own: Params, state: ClientState) -> tuple[ClientState, list[str]]:
    """Gives a client's state with its private LoRA factors, and all that is kept for them, cut to the client's rank.

    Args:
        own: all rules, of the client's rank, as `offered` gives them.
        state: the client's state; not modified.

    Returns:
        The state, itself where nothing is too large; and the rules that were cut, sorted.
    """
    large = [
        name
        for name, tensor in own.items()
        if (axis := rank_axis(name)) is not None
        and state.get(f"private/{name}", tensor).shape[axis] > tensor.shape[axis]
    ]
    found = dict(state)
    for key, tensor in state.items():
        name = key.rpartition("/")[2]  # also optimizer/exp_avg/NAME
        axis = rank_axis(name)
        if name in large and axis is not None and tensor.dim() == own[name].dim():
            found[key] = tensor.narrow(axis, 0, min(tensor.shape[axis], own[name].shape[axis])).clone()
    return (found if large else state), sorted(large)


def cut(params: Mapping[str, Tensor], rank: int | None, skip: int = 0) -> Params:
    """Gives LoRA factors with some of their components only, other tensors as they are; views, not copies.

    Args:
        params: A as `[rank, inputs]`, B as `[outputs, rank]`, and others.
        rank: at which component to end; None for the last.
        skip: at which component to begin.
    """
    part = slice(skip, rank)
    return {
        name: tensor if rank_axis(name) is None else tensor[part] if rank_axis(name) == 0 else tensor[:, part]
        for name, tensor in params.items()
    }


def padded(params: Mapping[str, Tensor], like: Mapping[str, Tensor], *, before: bool = False) -> Params:
    """Gives LoRA factors with zero components up to a rank; a tensor that needs none is returned itself.

    Zero components stay zero under training: each factor's gradient holds the other one.

    Args:
        params: tensors, some of them factors of a lower rank.
        like: tensors with the shapes that are wanted; names it lacks are left as they are.
        before: whether the zeros come first.
    """

    def one(name: str, tensor: Tensor) -> Tensor:
        axis, wanted = rank_axis(name), like.get(name, tensor).shape
        if axis is None or tensor.shape == wanted:
            return tensor
        shape = list(tensor.shape)
        shape[axis] = wanted[axis] - shape[axis]
        zeros = tensor.new_zeros(shape)
        return torch.cat([zeros, tensor] if before else [tensor, zeros], dim=axis)

    return {name: one(name, tensor) for name, tensor in params.items()}


def rank_axis(name: str) -> int | None:
    """Which dimension of a LoRA factor is its rank; None for what is no factor."""
    return {"lora_A": 0, "lora_B": 1}.get(name.rpartition(".")[2])
