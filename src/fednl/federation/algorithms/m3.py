"""M3 on the server: a fast and a slow momentum of the clients' mean change, orthogonalised."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from fednl.federation.algorithms.fedavg import FedAvg, Traits
from fednl.section import Section

if TYPE_CHECKING:
    import torch

    from fednl.federation.message import Message
    from fednl.federation.params import ClientState, Params


class M3Settings(Section):
    """The `[m3]` section; the defaults are ours.

    Args:
        server_lr: step size; roughly how far an element moves in the first round.
        momentum: what the fast buffer keeps from round to round, from 0 to 1. At 1 it adds up, as published, and
            does not settle: on a quadratic it swings about the optimum for ever.
        slow_rounds: after how many rounds their changes are added to the slow buffer, at least 1.
        slow_weight: weight of the slow buffer in a step, at least 0; 0 leaves it out.
        tau: added to the root of the summed squares, above 0; larger makes the steps less adaptive.
        newton_schulz_steps: iterations towards an orthogonal matrix, at least 0; 0 leaves matrices as they are.
    """

    server_lr: float = Field(default=1e-2, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0, le=1)
    slow_rounds: int = Field(default=4, ge=1)
    slow_weight: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    tau: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    newton_schulz_steps: int = Field(default=5, ge=0)


class M3(FedAvg):
    """Takes w = w - server_lr (N(m1) + slow_weight N(m2)) / (sqrt(h) + tau) on the server.

    With g the rules that were sent minus the clients' mean: m1 = momentum m1 + g every round, m2 = m2 + the sum
    of g over the last `slow_rounds` rounds whenever so many have passed, from the next round on, and h = h + g^2.
    N makes the singular values of a matrix equal, by Newton-Schulz, and leaves tensors of another number of
    dimensions as they are. Settings: `M3Settings`.

    Source: Behrouz et al. 2025 (arXiv 2512.24695), Algorithm 1, multi-scale momentum Muon. Ours: g is a mean change
    of clients in place of a gradient; N gives a matrix its Frobenius norm back, so that matrices and vectors
    step alike; `momentum` below 1; the three weights of the buffers, which only scale what is here, are left out.
    """

    Settings: ClassVar[type[BaseModel]] = M3Settings
    traits: ClassVar[Traits] = Traits(one_client_is_local=False, identical_clients_unchanged=False)

    def server_step(self, params: Params, combined: Message, server_state: ClientState) -> tuple[Params, ClientState]:
        """Takes one M3 step, in float64.

        Args:
            params: the shared rules that were sent out.
            combined: the combined replies.
            server_state: `fast/NAME`, `slow/NAME`, `chunk/NAME` (the sum since the slow buffer's last change),
                `squares/NAME`, and `rounds`, an int64; empty at first.
        """
        import torch

        settings = self.settings
        rounds = server_state.get("rounds", torch.zeros((), dtype=torch.int64)) + 1
        whole = int(rounds) % settings.slow_rounds == 0
        new: Params = {}
        state: ClientState = {"rounds": rounds}
        for name, mean in combined.params.items():
            change = params[name].double() - mean.double()
            fast = settings.momentum * server_state.get(f"fast/{name}", change * 0) + change
            slow = server_state.get(f"slow/{name}", change * 0)
            squares = server_state.get(f"squares/{name}", change * 0) + change.square()
            step = self._level(fast) + settings.slow_weight * self._level(slow)
            new[name] = (params[name].double() - settings.server_lr * step / (squares.sqrt() + settings.tau)).to(
                mean.dtype
            )
            chunk = server_state.get(f"chunk/{name}", change * 0) + change
            state |= {f"fast/{name}": fast, f"squares/{name}": squares}
            state |= {f"slow/{name}": slow + chunk * whole, f"chunk/{name}": chunk * (not whole)}
        return new, state

    def _level(self, tensor: torch.Tensor) -> torch.Tensor:
        steps = int(self.settings.newton_schulz_steps)
        return levelled(tensor, steps) if steps and tensor.ndim == 2 else tensor


def levelled(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Brings a matrix's singular values together, keeping its singular vectors and its Frobenius norm.

    X = X (3 I - X^T X) / 2 from the matrix divided by its norm; a singular value s in (0, 1] becomes
    s (3 - s^2) / 2, which rises to 1. Small ones take many steps: each step multiplies them by 1.5 at most.

    Args:
        matrix: [rows, columns]; all zeros stay so.
        steps: how often, at least 1.

    Source: Newton-Schulz iteration for the polar factor, cubic form.
    """
    import torch

    norm = torch.linalg.matrix_norm(matrix)
    if norm == 0:
        return matrix
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    x: torch.Tensor = tall / norm
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ (x.T @ x)
    x = x * (norm / torch.linalg.matrix_norm(x))
    return x if matrix.shape[0] >= matrix.shape[1] else x.T
