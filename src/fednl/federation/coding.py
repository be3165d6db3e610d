"""How the numbers of a message are written on the wire: fewer bits, deltas instead of values, and what rounding cost.

The plain form is the specification: `decode(encode(m, ...)) == m` up to the rounding of the format, and to the bit for
`"float32"`. bfloat16 travels as int16 with its tag, as not every carrier knows the format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fednl.errors import MessageError
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, add_scaled, finite, subtract

CODINGS = tuple(
    f"{form}{content}" for form in ("float32", "float16", "bfloat16", "int8") for content in ("", "-deltas")
)
"""Every tag that a message can carry: the form of its numbers, and whether they are changes."""

SCALES = "traffic/scales"
"""The extra tensor of `"int8"`: a scale for each tensor in the order of sorted names, float32 `[tensors]`."""

_RESIDUAL = "residual/"
_STEPS = 127
_WIRE = {"float16": torch.float16, "bfloat16": torch.int16, "int8": torch.int8}


def encode(
    message: Message, coding: str, start: Params, state: ClientState, error_feedback: bool = True
) -> tuple[Message, ClientState]:
    """Writes a message's rules in another form.

    Args:
        message: with rules as they are trained. Not modified.
        coding: one of `CODINGS`.
        start: the rules that a delta is taken from, as the client received them; read for deltas only.
        state: the client's state. Not modified.
        error_feedback: with `"int8"`, add what earlier rounding took (`residual/NAME` in the state), and keep what
            this one takes. A reply that the server refuses is not noticed: its part is lost.

    Returns:
        The message, and the state for the next round.

    Source: error feedback of Karimireddy et al. 2019 (arXiv 1901.09847), Algorithm 1; one symmetric scale a tensor.
    """
    form, _, is_delta = coding.partition("-")
    params = subtract(message.params, start) if is_delta else message.params
    if form != "int8":
        return replace(
            message, params={name: _FORMS[form](value) for name, value in params.items()}, coding=coding
        ), state
    if error_feedback:
        params = {name: value + state.get(_RESIDUAL + name, 0.0) for name, value in params.items()}
    scales = {name: _scale(value) for name, value in sorted(params.items())}
    sent = {name: _to_int8(value, scales[name]) for name, value in params.items()}
    lost = {_RESIDUAL + name: value - (sent[name] * scales[name]).to(value.dtype) for name, value in params.items()}
    if error_feedback and finite(lost):  # one bad round does not spoil those to come
        state = {**state, **lost}
    row = torch.stack(list(scales.values())) if scales else torch.zeros(0)
    return replace(message, params=sent, extra={**message.extra, SCALES: row}, coding=coding), state


def decode(message: Message, start: Params | None = None) -> Message:
    """Gives a message with its rules as values again.

    Args:
        message: of any coding; a client's has passed `fednl.federation.validate.check_update`. Not modified.
        start: the rules that deltas are added to, with every name of the message; values take their dtypes. None
            takes values as float32.

    Raises:
        MessageError: code `non-finite`; a scale is no usable number.
    """
    form, _, is_delta = message.coding.partition("-")
    extra = dict(message.extra)
    params = message.params
    if form == "int8":
        scales = extra.pop(SCALES)
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            raise MessageError("non-finite", f'Client "{message.client}" sent scales that are no finite sizes.')
        by_name = dict(zip(sorted(params), scales, strict=True))
        params = {name: value * by_name[name] for name, value in params.items()}
    elif form != "float32":
        params = {
            name: (value.view(torch.bfloat16) if form == "bfloat16" else value).float()
            for name, value in params.items()
        }
    if start is not None:
        params = {name: value.to(start[name].dtype) for name, value in params.items()}
    if is_delta and start is not None:
        params = add_scaled({name: start[name] for name in params}, params, 1.0)
    return replace(message, params=params, extra=extra, coding="float32")


def wire_layout(rules: Params, coding: str) -> tuple[Params, Params]:
    """Gives the tensors that a message of this coding has, and its extra ones, without memory behind them.

    Args:
        rules: the shared rules.
        coding: one of `CODINGS`.
    """
    form = coding.partition("-")[0]
    layout = {
        name: torch.empty(value.shape, dtype=_WIRE.get(form, value.dtype), device="meta")
        for name, value in rules.items()
    }
    return layout, {SCALES: torch.empty(len(rules), device="meta")} if form == "int8" else {}


def _scale(value: torch.Tensor) -> torch.Tensor:
    largest = value.detach().abs().max() if value.numel() else torch.zeros(())
    return (largest / _STEPS).float()


def _to_int8(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The nearest steps; a NaN has none, but its scale is NaN too, and the server refuses that."""
    if not float(scale) > 0:
        return torch.zeros_like(value, dtype=torch.int8)
    return (value / scale).round().clamp(-_STEPS, _STEPS).nan_to_num().to(torch.int8)


# What no form can hold becomes infinite, for the server to refuse and count.
_FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda value: value,
    "float16": lambda value: value.half(),
    "bfloat16": lambda value: value.bfloat16().view(torch.int16),
}
