"""What masked sums are made of: key agreement, masks from a seed, sealed letters between clients, shared secrets.

Only Python's own library is used, as the core has no other; its whole numbers do not take constant time, so whoever can
time a client's arithmetic closely is not kept out. Keys serve one round.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import torch

SECRET_BYTES = 32
KEY_BYTES = 256
SHARE_BYTES = 66
_MAC_BYTES = 32

# The 2,048-bit MODP group of RFC 3526, section 3; its generator is 2.
_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DD"
    "EF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7ED"
    "EE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F"
    "83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA0510"
    "15728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
_FIELD = 2**521 - 1
"""Secrets are shared modulo this prime."""


def new_secret() -> bytes:
    """Draws a secret from the system: 32 bytes."""
    return secrets.token_bytes(SECRET_BYTES)


def public_key(secret: bytes) -> bytes:
    """Gives the public half of a secret: 256 bytes."""
    return pow(2, int.from_bytes(secret, "big"), _PRIME).to_bytes(KEY_BYTES, "big")


def agree(secret: bytes, other_key: bytes, purpose: str) -> bytes:
    """Gives the 32 bytes that both owners of two key pairs can compute, and nobody else.

    Args:
        secret: one's own.
        other_key: the other's public half.
        purpose: another purpose gives unrelated bytes.

    Raises:
        ValueError: the key is none, such as one that would make the result known to all.

    Source: Diffie and Hellman 1976, over RFC 3526 group 14; SHA-256 of the result.
    """
    number = int.from_bytes(other_key, "big")
    if not 1 < number < _PRIME - 1:
        raise ValueError("no public key")
    shared = pow(number, int.from_bytes(secret, "big"), _PRIME).to_bytes(KEY_BYTES, "big")
    return hashlib.sha256(purpose.encode("ascii") + b"\0" + shared).digest()


def mask(seed: bytes, size: int) -> torch.Tensor:
    """Gives numbers that look random to whoever does not know the seed.

    Args:
        seed: 32 bytes.
        size: how many.

    Returns:
        int64 `[size]`, each in [0, 2^32).

    Source: SHAKE-256 (FIPS 202) as a generator.
    """
    stream = hashlib.shake_256(b"fednl mask\0" + seed).digest(4 * size)
    return torch.from_numpy(np.frombuffer(stream, dtype="<u4").astype(np.int64))


def seal(key: bytes, letter: bytes, label: bytes) -> bytes:
    """Encrypts and signs a letter; a key must seal only one letter under one label.

    Args:
        key: 32 bytes that sender and receiver have agreed on.
        letter: what to hide.
        label: who writes to whom.

    Source: encrypt, then MAC: SHAKE-256 as stream, HMAC-SHA-256 (RFC 2104).
    """
    hidden = _xor(letter, hashlib.shake_256(b"fednl seal\0" + key + label).digest(len(letter)))
    return hidden + hmac.new(key, label + hidden, hashlib.sha256).digest()


def unseal(key: bytes, sealed: bytes, label: bytes) -> bytes:
    """Opens what `seal` made.

    Raises:
        ValueError: it was made with another key or label, or was changed on the way.
    """
    hidden, signature = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
    if not hmac.compare_digest(signature, hmac.new(key, label + hidden, hashlib.sha256).digest()):
        raise ValueError("no letter of this sender")
    return _xor(hidden, hashlib.shake_256(b"fednl seal\0" + key + label).digest(len(hidden)))


def split(secret: bytes, shares: int, threshold: int) -> list[bytes]:
    """Shares a secret so that any `threshold` shares give it back, and fewer say nothing of it.

    Args:
        secret: 32 bytes.
        shares: how many; the i-th is the polynomial's value at i + 1.
        threshold: from 1 to `shares`.

    Returns:
        66 bytes each.

    Source: Shamir 1979, over the integers modulo 2^521 - 1.
    """
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(_FIELD) for _ in range(threshold - 1))]
    made = []
    for x in range(1, shares + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * x + coefficient) % _FIELD
        made.append(value.to_bytes(SHARE_BYTES, "big"))
    return made


def join(shares: Mapping[int, bytes]) -> bytes:
    """Gives the secret back.

    Args:
        shares: by position counted from 0; at least as many as the threshold.

    Returns:
        32 bytes.

    Raises:
        ValueError: the shares are too few, or do not belong together.
    """
    points: Sequence[tuple[int, int]] = [(at + 1, int.from_bytes(share, "big")) for at, share in shares.items()]
    total = 0
    for x, value in points:
        above = below = 1
        for other, _ in points:
            if other != x:
                above, below = above * other % _FIELD, below * (other - x) % _FIELD
        total = (total + value * above * pow(below, -1, _FIELD)) % _FIELD
    if total >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("shares of no secret")
    return total.to_bytes(SECRET_BYTES, "big")


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
