"""Secure aggregation with pairwise masks (Bonawitz et al. 2017, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", eprint 2017/281, Section 4 and Figure 4): FedAvg whose server sees
only masked updates.

In a round every user u of the cohort has a mask key pair (s) and a cipher key pair (c), both of X25519, and a
seed b_u. All are new in each round. The steps, with q and its arithmetic in
`pfl_ext.algorithms.finite_field`:

0. *Keys.* u sends its two public keys. The server sends all public keys to all users.
1. *Shares.* u splits its private mask key and b_u into Shamir shares: T + 1 shares determine them, T reveal
   nothing. It sends each other user v its shares, encrypted (ChaCha20-Poly1305) under a key on which u and v
   agree from their cipher keys. The server passes them on.
2. *Masked update.* u sends, with x_u its field elements and G a keystream,
   ``y_u = x_u + G(b_u) + sum_{v > u} G(s_uv) - sum_{v < u} G(s_uv)``, where u and v agree on s_uv from their
   mask keys (X25519, then HKDF with SHA-256). Every pair of users of step 1 has a mask.
3. *Unmasking.* The server announces whose y arrived. Each remaining user sends its share of b_v for every v
   whose y arrived, and its share of the mask key for every user lost after step 1; never both for one user.
   From T + 1 shares of each the server removes ``G(b_v)`` and the masks with lost users from the sum.

The result is the sum over the users whose y arrived. With fewer than T + 1 remaining users there is no sum;
options that lose so many are refused before training.

What a deployment would protect: suppose the server follows the protocol but looks at everything, and T users
give it all that they know. Then it learns nothing of any other user's update and weight but their sum over
these others (the paper's Theorem 6.3 with t = T + 1). Against a server that lies about who was lost one needs
T + 1 > 2 U / 3 and the paper's signed consistency round, which is not implemented. Neither is a public key
infrastructure, nor a defence against users who send a wrong update. Nothing bounds what the *sum* reveals of
one user; that is the task of differential privacy.

Letters: P trained parameters, U users of a cohort, T colluding ones, n = T + 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pfl_ext.algorithms.algorithm import Setup, Traffic, register, trained_bytes
from pfl_ext.algorithms.finite_field import (
    BYTES,
    KEY_BYTES,
    PRIME,
    Elements,
    digits,
    from_digits,
    recover,
    share,
    uniform,
)
from pfl_ext.algorithms.secure_sum import SecureSum, Sent, SumLost, unwatched
from pfl_ext.configs import rounded_down

TAG = 16
"""Bytes that the cipher adds to a message."""
NONCE = bytes(12)
"""A constant nonce: a key encrypts one message, since each direction has its own key."""
SHARE = BYTES * len(digits(bytes(KEY_BYTES)))
"""Bytes of one share of a key."""


def agreed(secret: bytes, public: bytes, purpose: str) -> bytes:
    """The 32 bytes on which two users agree, from one's private key and the other's public key."""
    shared = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose.encode()).derive(shared)


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def pair_mask(secret: bytes, user: int, other: int, public: bytes, size: int) -> Elements:
    """The mask, between -q and q, that ``user`` adds to its vector for ``other``, who adds its negative."""
    mask = uniform(agreed(secret, public, "mask"), size)
    return mask if user < other else -mask


class User:
    """One user in one round: its keys, and the shares that it received from the others.

    Args:
        place: its position in the cohort, from 0. Its shares are values at the point place + 1.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.mask_key, self.cipher_key, self.seed = (secrets.token_bytes(KEY_BYTES) for _ in range(3))
        self.held: dict[int, tuple[Elements, Elements]] = {}
        """By place, each user's shares of its mask key and of its seed, as held by this user."""

    @property
    def public(self) -> tuple[bytes, bytes]:
        """The public mask key and cipher key."""
        return public_of(self.mask_key), public_of(self.cipher_key)

    def shares(self, public: Sequence[tuple[bytes, bytes]], degree: int) -> dict[int, bytes]:
        """Step 1: an encrypted message to each other user, by its place."""
        points = [place + 1 for place in range(len(public))]
        both = np.hstack([share(digits(secret), degree, points) for secret in (self.mask_key, self.seed)])
        self.held[self.place] = _halves(both[self.place])
        return {
            other: self._cipher(self.place, other, cipher).encrypt(NONCE, _wire(both[other]), None)
            for other, (_, cipher) in enumerate(public)
            if other != self.place
        }

    def take(self, other: int, public: bytes, message: bytes) -> None:
        """Decrypt and keep the shares that user ``other``, with this public cipher key, sent."""
        content = self._cipher(other, self.place, public).decrypt(NONCE, message, None)
        self.held[other] = _halves(np.frombuffer(content, "<u4").astype(np.int64))

    def masked(self, vector: Elements, public: Sequence[tuple[bytes, bytes]]) -> Elements:
        """Step 2: y ``[P + 1]`` for this user's vector. A sum of U + 1 terms below 2^31 does not overflow."""
        total = vector + uniform(self.seed, len(vector))
        for other, (mask, _) in enumerate(public):
            if other != self.place:
                total += pair_mask(self.mask_key, self.place, other, mask, len(vector))
        return total % PRIME

    def _cipher(self, sender: int, receiver: int, public: bytes) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(agreed(self.cipher_key, public, f"shares from {sender} to {receiver}"))


def _wire(elements: Elements) -> bytes:
    return elements.astype("<u4").tobytes()


def _halves(both: Elements) -> tuple[Elements, Elements]:
    half = len(both) // 2
    return both[:half], both[half:]


def unmasked(
    masked: Mapping[int, Elements],
    public: Sequence[tuple[bytes, bytes]],
    answers: Mapping[int, Mapping[int, Elements]],
    degree: int,
) -> Elements:
    """The server's part of step 3.

    Args:
        masked: y ``[P + 1]`` of each remaining user, by place.
        public: the public keys of all users.
        answers: for each remaining user its share for every user, by place: a share of the seed of a
            remaining user, or of the mask key of a lost one.
        degree: T.

    Raises:
        SumLost: when fewer than T + 1 shares arrived, or they do not encode a key.
    """
    if len(answers) <= degree:
        raise SumLost(f"{len(answers)} of {len(public)} users are left, and {degree + 1} shares are needed")
    total = np.zeros_like(next(iter(masked.values())))
    for vector in masked.values():  # in total at most U^2 + 2 U terms below 2^31
        total += vector
    helpers = list(answers)[: degree + 1]
    for user in range(len(public)):
        shares = np.stack([answers[helper][user] for helper in helpers])
        key = from_digits(recover(shares, [helper + 1 for helper in helpers]))
        if key is None or (user not in masked and public_of(key) != public[user][0]):
            raise SumLost(f"the shares of user {user} give no key of that user")
        if user in masked:
            total -= uniform(key, len(total))
        else:
            for other in masked:  # each remaining user added minus this mask
                total += pair_mask(key, user, other, public[other][0], len(total))
    return total % PRIME


def pairwise_sum(
    vectors: Mapping[int, Elements], users: int, degree: int, sent: Sent = unwatched
) -> Elements:
    """The sum of the remaining users' vectors, by the whole protocol.

    Args:
        vectors: ``[P + 1]`` of each remaining user, by place.
        users: U, with the users who are lost after step 1.
        degree: T.
        sent: is called with each message.

    Raises:
        SumLost: when at most T users remain.
    """
    parties = [User(place) for place in range(users)]
    public = [party.public for party in parties]
    for party in parties:
        sent(party.place, None, "keys", b"".join(party.public))
        sent(None, party.place, "keys", b"".join(key for pair in public for key in pair))
    for party in parties:
        for other, message in party.shares(public, degree).items():
            sent(party.place, other, "shares", message)
            parties[other].take(party.place, public[party.place][1], message)
    masked = {place: parties[place].masked(vector, public) for place, vector in vectors.items()}
    for place, y in masked.items():
        sent(place, None, "masked update", y)
    answers = {}
    for place in masked:
        sent(None, place, "who is left", bytes(-(-users // 8)))
        held = parties[place].held
        answers[place] = {user: held[user][1 if user in masked else 0] for user in range(users)}
        sent(place, None, "answer", np.concatenate(list(answers[place].values())))
    return unmasked(masked, public, answers, degree)


@register("secure_aggregation")
class SecureAggregation(SecureSum):
    """FedAvg whose sum is computed with pairwise masks."""

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what `SecureSum` refuses, and rounds that would lose too many users for a sum."""
        super().check(setup)
        users, degree = setup.cohort_size, degree_of(setup)
        left = users - rounded_down(setup.options.drop_out, users)
        if users < 2:
            raise ValueError(
                "secure_aggregation hides a user among other users: set federated.cohort_size to 2 or more"
            )
        if left <= degree:
            raise ValueError(
                f"if users drop out, {left} of {users} are left, but with federated.options.colluding = "
                f"{degree} the sum needs {degree + 1}: lower colluding, or federated.options.drop_out"
            )

    def lost(self, users: int, number: int) -> list[int]:
        """A share `drop_out` of the cohort, drawn at random."""
        return self.drawn(np.arange(users), number)

    def total(self, vectors: Mapping[int, Elements], users: int, number: int) -> Elements:
        """The sum, by pairwise masks."""
        return pairwise_sum(vectors, users, degree_of(self.context))

    def bytes(self, state: Any) -> Traffic:
        """The model, the keys, the shares and the answers of a user who is not lost."""
        users, others = self.context.cohort_size, self.context.cohort_size - 1
        passed = others * (2 * SHARE + TAG)
        down = trained_bytes(self.context.module) + 2 * KEY_BYTES * users + passed + -(-users // 8)
        up = 2 * KEY_BYTES + passed + BYTES * self.elements + SHARE * users
        return Traffic(down, up)


def degree_of(setup: Setup) -> int:
    """T: as configured, or the largest with which half of the users may be lost."""
    return int(setup.options.colluding or max(1, -(-setup.cohort_size // 2) - 1))
