"""Masked sums: clients send their changes under masks that cancel in the sum, and the server learns the sum alone.

Four exchanges a round. `keys`: having trained, each client shows two public keys. `shares`: each splits its two
secrets into shares, sealed for each other client. `masked`: each sends its change, as whole numbers modulo 2^32, under
a mask of its own and one with every other client, which the two apply with opposite signs. `opened`: those still there
give the server, of each client, a share of its own mask's seed if its numbers came, or of its secret key if they did
not: never of both. A majority of those that showed keys must be there at the end, or the round has no result.

The server follows the protocol but may look at all it gets; it does not invent clients. A client's hostile numbers
cannot be told from others.

Source: Bonawitz et al. 2017 (CCS), figure 4 without the signatures of its active variant.
"""

from __future__ import annotations

import torch

from fednl.errors import MessageError
from fednl.federation.exchange import FEWEST_MASKED
from fednl.federation.masking import (
    KEY_BYTES,
    SHARE_BYTES,
    agree,
    mask,
    new_secret,
    public_key,
    seal,
    split,
    unseal,
)
from fednl.federation.params import ClientState, Params

STAGES = ("secure-keys", "secure-shares", "secure-masked", "secure-opened")
"""What a message's `coding` says in each exchange."""

SEALED_BYTES = 2 * SHARE_BYTES + 32
MODULUS = 2**32
_PREFIX = "secure/"


def threshold(clients: int) -> int:
    """Gives how many of the clients that showed keys must be there at the end: more than half."""
    return clients // 2 + 1


def steps_per_range(clients: int) -> int:
    """Gives how many whole numbers stand for the range.

    The sum of all clients' then needs half of 32 bits' numbers: what falls into the other half is no sum.
    """
    return 2**30 // clients


def layout(stage: str, clients: int, numbers: int) -> Params:
    """Gives the tensors of a client's reply in an exchange, without memory behind them.

    Args:
        stage: one of `STAGES`.
        clients: how many showed keys; not read for `"secure-keys"`.
        numbers: how many numbers the shared rules have.
    """
    shapes = {
        "secure-keys": ("keys", (2, KEY_BYTES), torch.uint8),
        "secure-shares": ("shares", (clients, SEALED_BYTES), torch.uint8),
        "secure-masked": ("masked", (numbers + 1,), torch.int32),
        "secure-opened": ("opened", (clients, SHARE_BYTES), torch.uint8),
    }
    name, shape, dtype = shapes[stage]
    return {_PREFIX + name: torch.empty(shape, dtype=dtype, device="meta")}


def hold(change: Params, state: ClientState, round: int) -> tuple[Params, ClientState]:
    """Keeps a client's change to itself, and makes its keys for the round.

    Args:
        change: float; not modified.
        state: the client's; what it held of another round is forgotten.
        round: counted from 1.

    Returns:
        The reply's tensors, and the state.
    """
    secret = [new_secret(), new_secret(), new_secret()]
    flat = torch.cat([change[name].detach().double().reshape(-1) for name in sorted(change)])
    keys = torch.stack([as_tensor(public_key(one)) for one in secret[:2]])
    held = {"change": flat, "secrets": torch.stack([as_tensor(one) for one in secret]), "round": torch.tensor(round)}
    return {_PREFIX + "keys": keys}, {**forget(state), **{_PREFIX + name: value for name, value in held.items()}}


def forget(state: ClientState) -> ClientState:
    """Gives a client's state without anything of a masked sum."""
    return {name: value for name, value in state.items() if not name.startswith(_PREFIX)}


def answer(stage: str, received: Params, state: ClientState, round: int, range: float) -> tuple[Params, ClientState]:
    """Does a client's part of the second to the fourth exchange.

    Args:
        stage: one of `STAGES` but the first.
        received: the server's tensors.
        state: the client's, from `hold`.
        round: counted from 1.
        range: the largest change of one number that can be sent.

    Returns:
        The reply's tensors, and the state.

    Raises:
        MessageError: code `stale-round`; the client holds nothing of this round, or has gone on already.
        MessageError: code `malformed`; the server's tensors are not what the exchange needs, or too few are left.
    """
    own = {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
    needed = {"secure-shares": "change", "secure-masked": "position", "secure-opened": "letters"}[stage]
    if int(own.get("round", torch.tensor(-1))) != round or needed not in own:
        raise MessageError("stale-round", "This client holds nothing for this exchange of the masked sum.")
    given = {name.removeprefix(_PREFIX): value for name, value in received.items()}
    try:
        if stage == "secure-shares":
            sent, own = _share(own, given)
        elif stage == "secure-masked":
            sent, own = _masked(own, given, range)
        else:
            sent, own = _opened(own, given)
    except (KeyError, IndexError, ValueError, RuntimeError):  # whatever a wrong message makes of the arithmetic
        raise MessageError("malformed", "The server's part of the masked sum cannot be used.") from None
    return {_PREFIX + name: value for name, value in sent.items()}, {
        **forget(state),
        **{_PREFIX + name: value for name, value in own.items()},
    }


def _share(own: Params, given: Params) -> tuple[Params, Params]:
    keys, position = given["keys"], int(given["position"])
    count = len(keys)
    if count < FEWEST_MASKED or not 0 <= position < count:
        raise ValueError("too few clients for a sum")
    sealing, masking, seed = (as_bytes(row) for row in own["secrets"])
    if as_bytes(keys[position][0]) != public_key(sealing) or as_bytes(keys[position][1]) != public_key(masking):
        raise ValueError("another one's place")
    parts = zip(split(seed, count, threshold(count)), split(masking, count, threshold(count)), strict=True)
    letters = torch.zeros(count, SEALED_BYTES, dtype=torch.uint8)
    kept = torch.zeros(2 * SHARE_BYTES, dtype=torch.uint8)
    for other, (of_seed, of_key) in enumerate(parts):
        if other == position:
            kept = as_tensor(of_seed + of_key)
        else:
            key = agree(sealing, as_bytes(keys[other][0]), "seal")
            letters[other] = as_tensor(seal(key, of_seed + of_key, _label(position, other)))
    return {"shares": letters}, {**own, "keys": keys, "position": torch.tensor(position), "kept": kept}


def _masked(own: Params, given: Params, range: float) -> tuple[Params, Params]:
    letters, present = given["shares"], _places(given["present"])
    count, position = len(own["keys"]), int(own["position"])
    if position not in present or len(present) < max(FEWEST_MASKED, threshold(count)):
        raise ValueError("too few clients for a sum")
    total = to_numbers(own["change"], range, count)
    total = total + mask(as_bytes(own["secrets"][2]), len(total))
    masking = as_bytes(own["secrets"][1])
    for other in present:
        if other != position:
            pair = mask(agree(masking, as_bytes(own["keys"][other][1]), "mask"), len(total))
            total = total + (pair if position < other else -pair)
    left = {name: value for name, value in own.items() if name != "change"}
    return {"masked": wrapped(total)}, {**left, "letters": letters, "present": given["present"]}


def _opened(own: Params, given: Params) -> tuple[Params, Params]:
    came, present = _places(given["present"]), _places(own["present"])
    count, position = len(own["keys"]), int(own["position"])
    if not came <= present or len(came) < max(FEWEST_MASKED, threshold(count)):
        raise ValueError("too few clients for a sum")
    sealing = as_bytes(own["secrets"][0])
    opened = torch.zeros(count, SHARE_BYTES, dtype=torch.uint8)
    for other in present:
        if other == position:
            letter = as_bytes(own["kept"])
        else:
            key = agree(sealing, as_bytes(own["keys"][other][0]), "seal")
            letter = unseal(key, as_bytes(own["letters"][other]), _label(other, position))
        opened[other] = as_tensor(letter[:SHARE_BYTES] if other in came else letter[SHARE_BYTES:])
    return {"opened": opened}, {}


def to_numbers(change: torch.Tensor, range: float, clients: int) -> torch.Tensor:
    """Writes a change as whole numbers, the last one being how many had to be cut to the range.

    Args:
        change: float `[numbers]`, finite.
        range: the largest magnitude that can be written.
        clients: how many may be added up.

    Returns:
        int64 `[numbers + 1]`, each of magnitude at most `steps_per_range(clients)`.
    """
    steps = steps_per_range(clients)
    cut = min(int((change.abs() > range).sum()), steps)
    numbers = (change.clamp(-range, range) * (steps / range)).round().long().clamp(-steps, steps)
    return torch.cat([numbers, torch.tensor([cut])])


def resolution(range: float, clients: int) -> float:
    """Gives the largest error of one client's number: half a step."""
    return 0.5 * range / steps_per_range(clients)


def wrapped(total: torch.Tensor) -> torch.Tensor:
    """Modulo 2^32, as int32 from -2^31."""
    return ((total + 2**31) % MODULUS - 2**31).to(torch.int32)


def _places(present: torch.Tensor) -> set[int]:
    return {at for at, flag in enumerate(present.tolist()) if flag}


def _label(sender: int, receiver: int) -> bytes:
    return f"{sender}>{receiver}".encode("ascii")


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Gives the bytes of a tensor of bytes."""
    return bytes(tensor.contiguous().numpy().tobytes())


def as_tensor(content: bytes) -> torch.Tensor:
    """Gives bytes as a tensor of their own."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
