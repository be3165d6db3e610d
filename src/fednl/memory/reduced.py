"""Rules as the start of rules with fewer numbers: write strengths of low rank, gates that read no input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

WHOLE = (".write.weight", ".write.decay.weight")
"""How the names of the matrices end that `memory.write-rank` replaces by `up` and `down`."""


def factored(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Replaces the matrices of the group `write` by the two factors whose product is nearest to them.

    Args:
        tensors: rules by canonical name; not modified. `[outputs, inputs]` each where a matrix is replaced.
        rank: the inner size, from 1 to the number of outputs.

    Returns:
        The same rules, with `up [outputs, rank]` and `down [rank, inputs]` where a matrix was, in its dtype. Their
        product is the matrix's truncated singular value decomposition, the best of that rank in the Frobenius norm; at
        full rank it is the matrix, but for rounding. Singular values are shared evenly among the two.

    Source: Eckart and Young 1936, theorem 1; computed in float64.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(WHOLE):
            made[name] = tensor
            continue
        left, sizes, right = torch.linalg.svd(tensor.double(), full_matrices=False)
        # Of each pair of singular vectors the signs are free: the largest number of the left one is positive.
        columns = left[:, :rank]
        signs = torch.sign(columns.gather(0, columns.abs().argmax(0, keepdim=True)))
        root, prefix = sizes[:rank].sqrt(), name.removesuffix("weight")
        made[f"{prefix}up"] = (columns * signs * root).to(tensor.dtype)
        made[f"{prefix}down"] = (right[:rank] * signs.T * root.unsqueeze(1)).to(tensor.dtype)
    return made


def unread(tensors: Mapping[str, Tensor], gate: Literal["head", "layer"]) -> dict[str, Tensor]:
    """Takes from every gate what makes it depend on the input: its bias remains.

    Args:
        tensors: rules by canonical name with `gate.weight [heads, hidden]` and `gate.bias [heads]`; not modified.
        gate: `"head"` keeps the biases as they are, `"layer"` their mean over heads, `[1]`.

    Returns:
        The same rules without `gate.weight`: each gate is what it was at an input of zeros, on average over heads.
    """
    made = {name: tensor for name, tensor in tensors.items() if not name.endswith(".gate.weight")}
    if gate == "layer":
        made |= {name: tensor.mean(0, keepdim=True) for name, tensor in made.items() if name.endswith(".gate.bias")}
    return made
