"""The mean of LoRA updates, which are products B A: what another pair of factors misses of it, and its best pair.

Averaging A and B separately gives mean(B) mean(A), not mean(B A); they differ by the weighted covariance of B and A.
Nothing here forms a matrix larger than the projection itself, and products are kept as factors as long as these are
smaller. All of it is float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fednl.federation.params import Params

_A, _B = ".lora_A", ".lora_B"


def pairs(names: Iterable[str]) -> list[str]:
    """Lists, sorted, the sites of which both factors are among the names: `layers.{i}.{module}`.

    Args:
        names: canonical names.
    """
    names = set(names)
    return sorted(name.removesuffix(_A) for name in names if name.endswith(_A) and name.removesuffix(_A) + _B in names)


class ProductMean:
    """The weighted mean of B_k A_k at every site, taken in reply by reply and kept as one pair of factors a site.

    Clients' factors stand side by side, B_k times its weight; where their ranks together outgrow the projection, the
    product itself replaces them. A reply may have any rank.

    Source: the stacking of FLoRA (arXiv 2409.05976), eq. 6.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        self._whole: dict[str, Tensor] = {}

    def add(self, params: Params, weight: float) -> None:
        """Takes one reply in; weight 0 changes nothing, and so do tensors that are no pair of factors.

        Args:
            params: A as `[rank, inputs]`, B as `[outputs, rank]`; not modified, not kept.
            weight: at least 0, usually the client's examples.
        """
        if weight <= 0:
            return
        self.weight += weight
        for site in pairs(params):
            right, left = params[site + _A].detach().double(), params[site + _B].detach().double() * weight
            if site in self._whole:
                self._whole[site] = self._whole[site] + left @ right
                continue
            if site in self._factors:
                left, right = _beside(self._factors.pop(site), (left, right))
            if len(right) <= min(len(left), right.shape[1]):
                self._factors[site] = left, right
            else:
                self._whole[site] = left @ right

    def result(self, weight: float | None = None) -> Params:
        """Gives the mean as factors under the sites' own names, in float64: `B @ A` is the mean product.

        Args:
            weight: what the sum is divided by; None for the weight of what came.
        """
        weight = self.weight if weight is None else weight
        found = {**self._factors, **{site: _as_factors(product) for site, product in self._whole.items()}}
        return {
            name: tensor
            for site, (left, right) in found.items()
            for name, tensor in ((site + _A, right), (site + _B, left / weight))
        }


def joined(first: Params, second: Params) -> Params:
    """Gives factors whose products are the sums of two products, site by site; the ranks add up.

    Args:
        first: factors of some sites.
        second: factors of the same sites.
    """
    both = {site: _beside(_pair(first, site), _pair(second, site)) for site in pairs(first)}
    return {name: t for site, (left, right) in both.items() for name, t in ((site + _A, right), (site + _B, left))}


def errors(exact: Params, taken: Params, before: Params) -> dict[str, float]:
    """Measures what a pair of factors misses of the mean product it stands for, in Frobenius norm over all sites.

    Args:
        exact: factors of the mean product, any rank; sites that are not in `taken` too are left out.
        taken: the factors that took its place.
        before: the factors that were sent out.

    Returns:
        `lora_error`, the norm of `exact - taken` over that of `exact`, and `lora_error_of_update`, over that of
        `exact - before`, which is what the round changed. One whose denominator is 0 is absent, and both without sites.
    """
    missed = moved = whole = 0.0
    for site in pairs(exact):
        if site + _A in taken and site + _B in taken:
            product, new, old = _in_one_basis([_pair(params, site) for params in (exact, taken, before)])
            whole += float(product.square().sum())
            missed += float((product - new).square().sum())
            moved += float((product - old).square().sum())
    measured = {"lora_error": whole, "lora_error_of_update": moved}
    return {name: (missed / of) ** 0.5 for name, of in measured.items() if of > 0}


def truncated(left: Tensor, right: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Gives the B and A of a bounded rank whose product is nearest to `left @ right`, in Frobenius norm.

    A's rows are orthogonal and of one length, that of `like`'s rows in the root mean square, and ordered by how much
    of the product they carry, so that the first r rows and columns are the best of rank r. A product of a lower rank
    than asked for leaves the last rows as in `like`, with zero columns in B: they can still be trained.

    Args:
        left: `[outputs, n]`, any n.
        right: `[n, inputs]`.
        like: an A of the wanted rank, `[rank, inputs]`, which gives the scale.

    Returns:
        B `[outputs, rank]` and A `[rank, inputs]`, in float64.

    Source: Eckart and Young 1936; in federated LoRA FlexLoRA (arXiv 2402.11505), section 3; the scale is ours.
    """
    left, right, start = left.double(), right.double(), like.detach().double()
    basis_left, core_left = torch.linalg.qr(left)
    basis_right, core_right = torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(core_left @ core_right.T, full_matrices=False)
    rank = min(len(start), len(s))
    length = float(start.square().sum(1).mean().sqrt()) or 1.0
    a = torch.cat([length * (vh[:rank] @ basis_right.T), start[rank:]])
    b = left.new_zeros(len(left), len(start))
    b[:, :rank] = basis_left @ (u[:, :rank] * s[:rank]) / length
    return b, a


def _pair(params: Mapping[str, Tensor], site: str) -> tuple[Tensor, Tensor]:
    return params[site + _B].detach().double(), params[site + _A].detach().double()


def _beside(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([one[0], other[0]], dim=1), torch.cat([one[1], other[1]])


def _as_factors(product: Tensor) -> tuple[Tensor, Tensor]:
    """A product as factors no larger than it: itself, and one on its shorter side."""
    outputs, inputs = product.shape
    one = torch.eye(min(outputs, inputs), dtype=product.dtype, device=product.device)
    return (product, one) if inputs <= outputs else (one, product)


def _in_one_basis(factors: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The products turned into one small basis, in which norms and differences are those of the products themselves.

    Squared sums over Gram matrices would be as small, but lose half of the digits where products nearly agree.
    """
    widths = [len(right) for _, right in factors]
    cores = [
        torch.linalg.qr(part, mode="r").R.split(widths, dim=1)
        for part in (torch.cat([left for left, _ in factors], 1), torch.cat([right for _, right in factors]).T)
    ]
    return [left @ right.T for left, right in zip(*cores, strict=True)]
