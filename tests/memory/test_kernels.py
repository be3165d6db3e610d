"""Handing over to a kernel: when, what it is given, what is made of its answer, and what is said. No GPU is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fednl.memory import kernels
from fednl.memory.operator import delta_rule_reference
from fednl.memory.rules_chunked import delta_product_rule
from fednl.memory.rules_reference import delta_product_reference
from memory.models import tokens, with_memory
from memory.test_operator import Inputs, agree, make, run

NARROW = 2e-6
calls: list[tuple[int, ...]] = []
"""The shape of the keys in every call of the kernel."""


def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in flash-linear-attention's layout: every head on its own, queries scaled."""
    calls.append(tuple(k.shape))
    assert q.shape == k.shape and v.shape[:3] == g.shape == beta.shape == k.shape[:3]
    assert {x.dtype for x in (q, k, v, g, beta)} == {torch.float32}
    memory = torch.zeros(k.shape[0], *k.shape[2:], v.shape[3]) if initial_state is None else initial_state
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    answers = []
    for t in range(k.shape[1]):
        memory = memory * g[:, t, :, None, None].exp()
        residual = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], memory)
        memory = memory + torch.einsum("bhk,bhv,bh->bhkv", k[:, t], residual, beta[:, t])
        answers.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], memory))
    return torch.stack(answers, 1), memory if output_final_state else None


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes the processor for a GPU whose machine has the kernel."""
    packages = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule")}
    packages["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = kernel  # type: ignore[attr-defined]
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(kernels, "_DEVICE", "cpu")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    kernels._kernel.cache_clear()
    calls.clear()
    yield
    kernels._kernel.cache_clear()


def float32(inputs: Inputs) -> Inputs:
    return {name: x.float() for name, x in inputs.items()}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("group", [1, 3])
def test_what_the_kernel_gives_is_the_recurrence_in_values_and_gradients(group: int, decay: float, warm: bool) -> None:
    inputs = make(11, group=group, decay=decay, warm=warm)
    found = run(kernels.delta_rule, float32(inputs))
    assert calls == [(2, 11, 2 * group, 6)], "a head for every query head"
    agree({name: x.double() for name, x in found.items()}, run(delta_rule_reference, inputs), 20 * NARROW)


def test_rules_made_of_the_delta_rule_are_handed_over_too() -> None:
    x = float32(make(11))
    k, v, beta = (torch.stack([part, part.flip(1)], 2) for part in (x["k"], x["v"], x["beta"]))
    out, state = delta_product_rule(x["q"], k, v, beta, state=x["state"])
    expected = delta_product_reference(x["q"], k, v, beta, state=x["state"])
    assert calls == [(2, 22, 4, 6)]
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected[1], rtol=1e-4, atol=1e-5)


def test_a_model_reads_with_the_kernel_and_decodes_without() -> None:
    model, ids = with_memory(), tokens(1, 12)
    with torch.no_grad():
        model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert [shape[1] for shape in calls] == [12, 12, 12]


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: {name: part.double() for name, part in x.items()},
        lambda x: {name: part if name == "state" else part[:, :8] for name, part in x.items()},
        lambda x: {**float32(make(11, key_dim=257))},
    ],
    ids=["float64", "few tokens", "wide keys"],
)
def test_what_the_kernel_does_not_compute_is_left_to_torch(changed: Callable[[Inputs], Inputs]) -> None:
    inputs = changed(float32(make(11)))
    out, state = kernels.delta_rule(**inputs)
    expected = delta_rule_reference(**inputs)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected[1], rtol=1e-4, atol=1e-4)
    assert not calls


def test_a_processor_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "_DEVICE", "cuda")
    kernels.delta_rule(**float32(make(11)))
    assert not calls and capsys.readouterr().err == ""


def test_wrong_arguments_are_named_before_the_kernel_sees_them() -> None:
    inputs: dict[str, Any] = float32(make(11))
    with pytest.raises(ValueError, match="beta must be at least 0"):
        kernels.delta_rule(**{**inputs, "beta": -inputs["beta"]})
    with pytest.raises(ValueError, match="v has shape"):
        kernels.delta_rule(**{**inputs, "v": inputs["v"][:, 1:]})
    with pytest.raises(ValueError, match=r"q must be \[batch, tokens, heads, dim\]"):
        kernels.delta_rule(**{**inputs, "q": inputs["q"][0]})
    assert not calls


def test_one_line_says_once_which_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        kernels.delta_rule(**float32(make(11)))
    assert capsys.readouterr() == ("", "fednl: on the GPU the delta rule runs in flash-linear-attention's kernel.\n")
    assert len(calls) == 3


def test_without_the_package_torch_runs_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    inputs = float32(make(11))
    for _ in range(3):
        out, _ = kernels.delta_rule(**inputs)
    torch.testing.assert_close(out, delta_rule_reference(**inputs)[0], rtol=1e-4, atol=1e-5)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and not calls
    assert lines[0].startswith("fednl: on the GPU the delta rule runs in plain torch") and "fednl[gpu]" in lines[0]


@pytest.mark.parametrize(("precision", "found"), [("highest", "ieee"), ("high", None)])
def test_the_kernel_rounds_float32_numbers_only_where_pytorch_may(
    precision: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    kernels.delta_rule(**float32(make(11)))
    assert os.environ.get("TRITON_F32_DEFAULT") == found and calls
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
