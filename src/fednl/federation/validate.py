"""What a client's reply must be before it may touch the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fednl.errors import MessageError
from fednl.federation.message import Message
from fednl.federation.params import Params

MOST_EXAMPLES = 10**9
"""More training examples than this are not believed, as the number is the client's weight in the mean."""

CODES = (
    "malformed",
    "unknown-client",
    "duplicate",
    "stale-round",
    "num-examples",
    "unknown-name",
    "missing-name",
    "shape",
    "dtype",
    "non-finite",
)
"""Every reason for which a reply is refused; refusals are counted by these."""


def check_update(
    message: Message,
    expected: Params,
    round: int,
    client: str,
    *,
    run: str = "",
    expected_extra: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Refuses a reply that is not exactly what was asked for; a refusal never repeats what the client wrote.

    Args:
        message: the reply.
        expected: the allow-list: the names that travel, each with a tensor of the right shape and dtype.
        round: the round now; a reply must echo it.
        client: who the transport says has sent it.
        run: the run now; a reply must echo it.
        expected_extra: the same for `message.extra`; None lets none through.

    Raises:
        MessageError: its `code` is one of `CODES`; of several faults, the first that is looked for.
    """
    if message.client != client:
        raise MessageError("unknown-client", f'A reply from client "{client}" carries another name.')
    if message.round != round or message.run != run:
        raise MessageError("stale-round", f'The reply of client "{client}" is not for round {round} of this run.')
    # bool is an int in Python, and a weight of True would pass for one example.
    if type(message.num_examples) is not int or not 0 <= message.num_examples <= MOST_EXAMPLES:
        raise MessageError("num-examples", f'Client "{client}" must have from 0 to {MOST_EXAMPLES} examples.')
    _check_tensors(message.params, expected, client)
    _check_tensors(message.extra, expected_extra or {}, client)


def _check_tensors(sent: Params, expected: Mapping[str, torch.Tensor], client: str) -> None:
    unknown = len(sent.keys() - expected.keys())
    if unknown:
        raise MessageError(
            "unknown-name",
            f'Client "{client}" sent {unknown} tensors that [federation] shared does not let out.',
        )
    for name in sorted(expected):
        if name not in sent:
            raise MessageError("missing-name", f'Client "{client}" did not send "{name}".')
        tensor, model = sent[name], expected[name]
        if tensor.shape != model.shape:
            raise MessageError(
                "shape", f'Client "{client}" sent "{name}" as {list(tensor.shape)}, not {list(model.shape)}.'
            )
        if tensor.dtype != model.dtype:
            raise MessageError("dtype", f'Client "{client}" sent "{name}" as {tensor.dtype}, not {model.dtype}.')
        if not bool(torch.isfinite(tensor).all()):
            raise MessageError("non-finite", f'Client "{client}" sent "{name}" with NaN or infinity in it.')
