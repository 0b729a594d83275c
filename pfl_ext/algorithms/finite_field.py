"""Arithmetic modulo the prime q = 2^31 - 1: updates as field elements, masks, and shares of secrets.

An element is an int64 in 0..q - 1. Nothing overflows:

* a product of two elements is at most (q - 1)^2 < 2^62, and with one more element added it is below 2^63;
* a sum of k elements is below k 2^31, and so below 2^63 for fewer than 2^32 of them;
* the docstring of `combine` says why it is exact.

On the wire an element takes 4 bytes (`BYTES`).

A real number x in fixed point is the integer nearest to ``x 2^b`` (ties to the even one) modulo q; a negative
integer n is ``q - |n|``. `decode` recovers a sum of such numbers if it is at most ``(q - 1) / 2`` from 0,
which `most_bits` guarantees.

Masks come from ChaCha20's keystream (RFC 8439) under 32-byte keys of the operating system's generator.
Secrets are shared as Shamir does (1979, "How to share a secret"), with Lagrange's interpolation.

Letters: P numbers of a vector, n points, m vectors.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from dataset.arrays import FloatArray, IntArray

PRIME = 2**31 - 1
"""q."""
BYTES, KEY_BYTES = 4, 32
"""Bytes of an element, and of the key of a keystream."""
MOST_BITS = 30
"""Most bits after the binary point: with more, a single number of size 1 would not fit."""
BLOCK = 4096
"""Numbers of a vector that are processed at once, so that they stay in the processor's cache."""
DIGIT = 30
"""Bits of a secret that one element holds."""
Elements = IntArray


def most_bits(total_weight: int, users: int, clip: float) -> int:
    """The most bits b after the binary point with which no sum of users' numbers wraps around.

    A user of weight w sends the integer nearest to ``w x 2^b`` with ``|x| <= clip``, which is at most
    ``w clip 2^b + 1/2``; the sum over users has to be at most ``(q - 1) / 2``. The weights too are summed.

    Returns:
        At most `MOST_BITS`, and -1 where 0 bits are too many.
    """
    room = (PRIME - 1) // 2
    if total_weight > room:
        return -1
    for bits in range(MOST_BITS, -1, -1):
        if total_weight * clip * 2**bits + users / 2 <= room:
            return bits
    return -1


def encode(values: npt.NDArray[np.floating], weight: int, bits: int, clip: float) -> Elements:
    """``weight`` times the values, each clipped to -clip..clip before, in fixed point ``[P]``.

    Raises:
        ValueError: for values that are no finite numbers.
    """
    wide = values.astype(np.float64)
    if not np.isfinite(wide).all():
        raise ValueError(
            "a user's update has numbers that are not finite, so it cannot be summed securely: lower "
            "local.learning_rate"
        )
    scaled: Elements = np.rint(np.clip(wide, -clip, clip) * (float(weight) * 2.0**bits)).astype(np.int64)
    residues: Elements = scaled % PRIME
    return residues


def decode(total: Elements, bits: int) -> FloatArray:
    """The sum of encoded numbers, each at most ``1/2 2^-bits`` away from what was encoded."""
    signed = np.where(total > PRIME // 2, total - PRIME, total)
    return signed / 2.0**bits


def uniform(key: bytes, size: int) -> Elements:
    """``[size]`` elements from a key; without the key they look like independent uniform elements.

    Each element is 31 bits of the keystream. The value q, one pattern in 2^31, is skipped.
    """
    spare = 16
    while True:
        stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(4 * (size + spare)))
        words = np.frombuffer(stream, "<u4") & np.uint32(PRIME)
        if not (words[:size] == PRIME).any():
            return np.array(words[:size], np.int64)
        words = words[words != PRIME]
        if len(words) >= size:
            return np.array(words[:size], np.int64)
        spare *= 2  # the longer stream begins with the shorter one


def fresh(size: int) -> Elements:
    """``[size]`` independent uniform elements, which cannot be drawn again."""
    return uniform(secrets.token_bytes(KEY_BYTES), size)


def inverse(element: int) -> int:
    """The multiplicative inverse of an element that is not 0."""
    return pow(int(element), -1, PRIME)


def lagrange(at: Sequence[int], points: Sequence[int]) -> Elements:
    """Lagrange's coefficients ``[len(at), n]``.

    Row a times a polynomial's values at n distinct points is its value at ``at[a]``, for a degree below n.
    """
    rows = np.empty((len(at), len(points)), np.int64)
    for column, root in enumerate(points):
        others = [point for point in points if point != root]
        below = inverse(math.prod((root - point) % PRIME for point in others) % PRIME)
        for row, place in enumerate(at):
            above = math.prod((place - point) % PRIME for point in others)
            rows[row, column] = above * below % PRIME
    return rows


def combine(coefficients: Elements, vectors: Elements) -> Elements:
    """The product of ``[a, m]`` and ``[m, P]`` in the field.

    It is computed in float64, which has fast matrix products and is exact below 2^53. Each number of a vector
    is written as ``2^16 h + l`` with h and l below 2^16, so a sum of 64 products with coefficients is below
    2^53. The recombined numbers are below ``2^31 2^16 + 2^53 + 2^31``.
    """
    total = np.zeros((len(coefficients), vectors.shape[1]), np.int64)
    factors = coefficients.astype(np.float64)
    for begin in range(0, vectors.shape[1], BLOCK):
        into = total[:, begin : begin + BLOCK]
        for first in range(0, len(vectors), 64):
            part, factor = vectors[first : first + 64, begin : begin + BLOCK], factors[:, first : first + 64]
            high = (factor @ (part >> 16).astype(np.float64)).astype(np.int64) % PRIME
            low = (factor @ (part & 0xFFFF).astype(np.float64)).astype(np.int64)
            into += (high << 16) + low
            into %= PRIME
    return total


def share(secret: Elements, degree: int, points: Sequence[int]) -> Elements:
    """Shamir's shares ``[n, P]`` of ``secret`` ``[P]`` at points that are not 0.

    Any ``degree`` shares are uniform and independent of the secret; ``degree`` + 1 shares determine it.
    """
    polynomial = np.vstack([secret[None], fresh(degree * len(secret)).reshape(degree, len(secret))])
    powers = [[pow(point, exponent, PRIME) for exponent in range(degree + 1)] for point in points]
    return combine(np.array(powers, np.int64), polynomial)


def recover(shares: Elements, points: Sequence[int]) -> Elements:
    """The secret ``[P]`` from shares ``[n, P]``, where n must be above their degree."""
    secret: Elements = combine(lagrange([0], points), shares)[0]
    return secret


def digits(key: bytes) -> Elements:
    """A key of 32 bytes as 9 elements."""
    number = int.from_bytes(key, "little")
    count = -(-8 * KEY_BYTES // DIGIT)
    return np.array([number >> DIGIT * place & 2**DIGIT - 1 for place in range(count)], np.int64)


def from_digits(elements: Elements) -> bytes | None:
    """The key that `digits` encoded; None for elements that encode none (after shares were altered)."""
    number = sum(int(element) << DIGIT * place for place, element in enumerate(elements))
    return None if number >= 2 ** (8 * KEY_BYTES) else number.to_bytes(KEY_BYTES, "little")
