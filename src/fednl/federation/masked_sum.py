"""The server's arithmetic of a masked sum: masked numbers are added as they come, and the masks taken off the sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fednl.federation.masking import agree, join, mask, public_key
from fednl.federation.params import Params, count
from fednl.federation.secure import MODULUS, SEALED_BYTES, as_bytes, steps_per_range, threshold, wrapped


class MaskedSum:
    """The server's side: adds masked numbers as they come, and takes the masks off the sum.

    Args:
        keys: by client that showed them, `[2, 256]` uint8.
        rules: the shared rules, whose layout the sum gets.
        range: the largest change of one number that can be sent.
    """

    def __init__(self, keys: Mapping[str, torch.Tensor], rules: Params, range: float) -> None:
        self.clients = sorted(keys)
        self._keys, self._rules, self._range = keys, rules, range
        self._total = torch.zeros(count(rules) + 1, dtype=torch.int64)
        self._came: list[str] = []

    @property
    def needed(self) -> int:
        """How many clients must be there at the end."""
        return threshold(len(self.clients))

    def add(self, client: str, masked: torch.Tensor) -> None:
        """Adds one client's masked numbers; they say nothing by themselves, and are not kept."""
        self._total = (self._total + masked.long()) % MODULUS
        self._came.append(client)

    def places(self, clients: Iterable[str]) -> torch.Tensor:
        """Gives which of the clients that showed keys are among `clients`, as uint8 `[clients]`."""
        those = set(clients)
        return torch.tensor([client in those for client in self.clients], dtype=torch.uint8)

    def letters(self, shares: Mapping[str, torch.Tensor], receiver: str) -> torch.Tensor:
        """Gives the sealed letters to one client, a row for each sender; zeros where none was written."""
        at, none = self.clients.index(receiver), torch.zeros(SEALED_BYTES, dtype=torch.uint8)
        return torch.stack([shares[sender][at] if sender in shares else none for sender in self.clients])

    def result(self, opened: Mapping[str, torch.Tensor], present: Iterable[str]) -> tuple[Params, int]:
        """Takes the masks off.

        Args:
            opened: by client still there, what it opened; at least `needed` of them.
            present: the clients that had written letters.

        Returns:
            The sum of the changes, float64, and how many single numbers were cut to the range.

        Raises:
            ValueError: the shares do not belong together, or the masks do not come off.
        """
        size, total = len(self._total), self._total
        index = {client: at for at, client in enumerate(self.clients)}
        for client in present:
            givers = sorted(opened.items())[: self.needed]
            secret = join({index[giver]: as_bytes(rows[index[client]]) for giver, rows in givers})
            if client in self._came:
                total = total - mask(secret, size)
                continue
            if public_key(secret) != as_bytes(self._keys[client][1]):
                raise ValueError("shares of another key")
            for other in self._came:
                pair = mask(agree(secret, as_bytes(self._keys[other][1]), "mask"), size)
                total = total + (-pair if other < client else pair)
        numbers = wrapped(total).double()
        if float(numbers.abs().max()) > len(self._came) * steps_per_range(len(self.clients)):
            raise ValueError("no sum of such numbers")
        return self._to_changes(numbers)

    def _to_changes(self, numbers: torch.Tensor) -> tuple[Params, int]:
        values, changes, at = numbers[:-1] * (self._range / steps_per_range(len(self.clients))), {}, 0
        for name in sorted(self._rules):
            size = self._rules[name].numel()
            changes[name] = values[at : at + size].reshape(self._rules[name].shape)
            at += size
        return changes, int(numbers[-1])
