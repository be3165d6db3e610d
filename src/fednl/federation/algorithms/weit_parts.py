"""The arithmetic of FedWeIT: rules put together from a base and a task's parts, and rows that some clients leave out.

Tensors are found by name: `NAME` is a rule of the base, `now/PART/NAME` the running task's, `task/TASK/PART/NAME` a
finished one's; the parts are `adaptive`, `mask`, `attention`, `others`, `borrowed` and `anchor`. `heard/NAME` are the
others' parts that the next task begins with; `owed/TASK` names the task whose part the server has yet to count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fednl.federation.params import Params


def is_base(name: str) -> bool:
    """Tells whether a name is that of a rule, and of no part."""
    return "/" not in name


def is_moved(name: str) -> bool:
    """Tells whether local steps move a part: the running task's, and every adaptive one."""
    return name.startswith(("now/mask/", "now/adaptive/", "now/attention/")) or (
        name.startswith("task/") and "/adaptive/" in name
    )


def anchors(state: Params) -> list[str]:
    """Lists where finished tasks were, `task/TASK/anchor/NAME`, of a client's state."""
    return [name for name in state if name.startswith("task/") and "/anchor/" in name]


def moved(tensors: Params) -> Params:
    """Gives the parts that local steps move; not copied."""
    return {name: tensor for name, tensor in tensors.items() if is_moved(name)}


def composed(params: Params, state: Params) -> Params:
    """Gives the rules of the running task, B m + A + sum_j a_j A_j; a rule without parts as it is.

    Args:
        params: the base and the parts that local steps move.
        state: where the others' adaptive parts are.
    """
    rules = {name: tensor for name, tensor in params.items() if is_base(name)}
    for name, base in rules.items():
        if f"now/adaptive/{name}" in params:
            rules[name] = _masked(base, params.get(f"now/mask/{name}")) + params[f"now/adaptive/{name}"]
        if f"now/attention/{name}" in params:
            rules[name] = rules[name] + borrowed(name, {**state, **params})
    return rules


def borrowed(name: str, tensors: Params) -> torch.Tensor:
    """Gives what the running task takes of other clients for a rule: each one's adaptive part times its weight.

    Args:
        name: the rule's.
        tensors: weights `[clients]`, and adaptive parts with one more axis in front than the rule.
    """
    import torch

    found: torch.Tensor = torch.tensordot(tensors[f"now/attention/{name}"], tensors[f"now/others/{name}"], 1)
    return found


def finished(anchor: str, tensors: Params) -> torch.Tensor:
    """Gives B m_i + A_i of a finished task and a rule.

    Args:
        anchor: `task/TASK/anchor/NAME`, which names both.
        tensors: the base, and the task's parts as far as it has any.
    """
    found = _masked(tensors[anchor.rpartition("/")[2]], tensors.get(anchor.replace("/anchor/", "/mask/")))
    adaptive = tensors.get(anchor.replace("/anchor/", "/adaptive/"))
    return found if adaptive is None else found + adaptive


def put_aside(task: str, shared: list[str], tensors: Params) -> Params:
    """Gives a client's state with the running task's parts under its name, and anchors at where all tasks are now.

    Args:
        task: the name of the task that ends.
        shared: the rules that have parts.
        tensors: the client's state, the base, and all parts.
    """
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("now/")}
    for name in shared:
        kept[f"task/{task}/anchor/{name}"] = tensors[name]
        for part in ("mask", "adaptive"):
            if f"now/{part}/{name}" in tensors:
                kept[f"task/{task}/{part}/{name}"] = tensors[f"now/{part}/{name}"]
        if f"now/attention/{name}" in tensors:
            kept[f"task/{task}/borrowed/{name}"] = borrowed(name, tensors)
            kept.setdefault(f"heard/{name}", tensors[f"now/others/{name}"])  # for the next task, if nothing newer came
    kept |= {name: finished(name, kept) for name in anchors(kept)}
    return {name: tensor for name, tensor in kept.items() if not is_base(name)}


def owed(state: Params) -> str:
    """Gives the name of the finished task whose adaptive part the server has yet to count; empty for none."""
    return next((name.removeprefix("owed/") for name in state if name.startswith("owed/")), "")


def without_counted(state: Params, counted: int) -> Params:
    """Gives a client's state without the mark of an adaptive part that the server has counted.

    Args:
        state: with the round that first carried the part as `owed/TASK`; 0 if none has.
        counted: the last round whose update holds a reply of the client.
    """
    return {name: t for name, t in state.items() if not name.startswith("owed/") or not 0 < int(t) <= counted}


def side_by_side(held: Params) -> Params:
    """Gives all clients' latest adaptive parts by rule as `adaptive/NAME`, `[clients, ...]`, in order of their names.

    Args:
        held: what the server holds, as `adaptive/CLIENT/NAME`, every rule of every client that is in it; a client's
            name may hold anything.

    Returns:
        These, and which row is whose as `row/CLIENT`, int64.
    """
    import torch

    split = [key.removeprefix("adaptive/").rpartition("/") for key in held]
    owners = sorted({owner for owner, _, _ in split})
    found = {
        f"adaptive/{name}": torch.stack([held[f"adaptive/{owner}/{name}"] for owner in owners])
        for name in dict.fromkeys(name for _, _, name in split)
    }
    return found | {f"row/{owner}": torch.tensor(row) for row, owner in enumerate(owners)}


def of_others(client: str, everybodys: Params) -> Params:
    """Gives others' latest adaptive parts, without what says whose they are; nothing where there are no others.

    Args:
        client: whose own are left out; without any, it gets the tensors themselves.
        everybodys: as `side_by_side` gave it.
    """
    import torch

    stacked = {name: tensor for name, tensor in everybodys.items() if name.startswith("adaptive/")}
    if f"row/{client}" not in everybodys:
        return stacked
    row = int(everybodys[f"row/{client}"])
    others = {name: torch.cat([tensor[:row], tensor[row + 1 :]]) for name, tensor in stacked.items()}
    return {name: tensor for name, tensor in others.items() if len(tensor)}


def by_rows(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gives one number a row in a shape that meets a rule's rows.

    Args:
        rows: `[rows]`, or a single number for a rule that is one.
        like: `[rows, ...]`.
    """
    return rows.reshape(rows.shape + (1,) * (like.dim() - rows.dim()))


def counting(mask: torch.Tensor, unsent: float) -> torch.Tensor:
    """Gives 1 for the rows whose mask is at least the quantile, else 0; rows that are all alike all count.

    Args:
        mask: logits, `[rows]` or a single one.
        unsent: which quantile, from 0 to below 1.
    """
    # Asked this way round, NaN counts: what diverged is sent, refused and counted, and not left out in silence.
    return (~(mask < mask.reshape(-1).quantile(unsent))).to(mask.dtype)


def mean_of_senders(start: torch.Tensor, mean: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Gives the mean over those that sent a row: the start where nobody did, the mean to the bit where all did.

    Args:
        start: what clients received, and what stands for a row that one did not send.
        mean: over all clients.
        share: `[rows]`, the weight of those that sent each row, out of 1.
    """
    weight = by_rows(share, mean).double()
    way = start.double() + (mean.double() - start.double()) / weight.clamp(min=1e-15)
    found: torch.Tensor = mean.where(weight == 1, way.to(mean.dtype)).where(weight > 0, start)
    return found


def _masked(base: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return base if mask is None else base * by_rows(mask.sigmoid(), base)
