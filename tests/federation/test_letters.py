"""What each client is sent: how much work a round's letters are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation_toys import Bench, start_params

from fednl.federation.algorithms.fedweit import FedWeIt
from fednl.federation.letters import Letters, message_of
from fednl.federation.record import Federation, Point

CLIENTS = [f"c{number:02}" for number in range(20)]


class Watched(dict[str, torch.Tensor]):
    """Counts how often its names are gone through, and how often a tensor is taken out."""

    gone_through = taken = 0

    def __iter__(self) -> Any:
        self.gone_through += 1
        return super().__iter__()

    def keys(self) -> Any:
        self.gone_through += 1
        return super().keys()

    def items(self) -> Any:
        self.gone_through += 1
        return super().items()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.taken += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("told", [0, 15, 20])
def test_adaptive_parts_are_put_together_once_a_round_and_copied_for_who_is_sent_them(
    told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Bench(tmp_path / "r", sizes=dict.fromkeys(CLIENTS, 3), algorithm=FedWeIt(shared="all"))
    params = start_params()
    held = Watched({f"adaptive/{client}/{name}": tensor for client in CLIENTS for name, tensor in params.items()})
    point = Point(1, params, held, told=tuple(CLIENTS[:told]))
    transport = toy.transport()
    given = (toy.algorithm, transport, toy.settings, toy.training, toy.run_folder, "", 0, toy.events.append, None)
    fed = Federation(*given, tuple(sorted(params)), len(CLIENTS))
    copied = []

    def counting(whole: Any) -> Any:
        def counted(tensors: Any, *rest: Any) -> torch.Tensor:
            copied.append(sum(tensor.numel() for tensor in tensors))
            return whole(tensors, *rest)  # type: ignore[no-any-return]

        return counted

    for what in ("stack", "cat"):
        monkeypatch.setattr(torch, what, counting(getattr(torch, what)))
    letters = Letters(fed, point, message_of(fed, point))
    sent = {client: letters.to(client)[0].extra for client in CLIENTS}
    assert [len(extra) for extra in sent.values()] == [0] * told + [len(params)] * (20 - told)
    numbers_sent = sum(tensor.numel() for extra in sent.values() for tensor in extra.values())
    somebody = told < 20
    assert held.taken <= len(held) * somebody
    assert held.gone_through <= 2 * somebody
    assert sum(copied) <= numbers_sent + somebody * sum(tensor.numel() for tensor in held.values())
