"""Turbo-Aggregate (So, Guler and Avestimehr 2020, "Turbo-Aggregate: Breaking the Quadratic Aggregation
Barrier in Secure Federated Learning", arXiv 2002.04156, Section IV): FedAvg whose sum goes from group to
group.

The U users of a round are put into L groups of N at random. Group 1 begins, each hands on to the next, and
group L to group 1 again, which closes the circle. With q and its arithmetic in
`pfl_ext.algorithms.finite_field`, user i of group l

* has a mask u_i, which the server gave to it alone, and draws r_ij with ``sum_j r_ij = 0`` over the users j
  of group l + 1. Each j gets ``x_ij = x_i + u_i + r_ij``;
* draws the polynomial f_i of degree below N with ``f_i(alpha_j) = x_ij``, and each j gets ``f_i(beta_j)``
  besides, at a point of its own: the redundancy, coded as Lagrange;
* holds a share s_i of the sum so far, the mean of the shares of group l - 1 plus what group l - 1's users
  sent to it, ``s_i = mean_j s_j + sum_j x_ji``, and in the same way a coded share t_i at its
  beta. It sends both to each user of group l + 1.

The shares s of a group are values at alpha of one polynomial of degree below N, and the coded shares t its
values at beta. So group l + 1 finds all of s from any N of these 2 N numbers: up to half of
each group may be lost with no loss but their own updates. As the r cancel in the mean over a group,
``mean_i s_i = sum x_j + u_j`` over all users who were not lost in the groups before. Group 1 sends the shares
of the end to the server, which finds those that were lost, and takes away the masks of those who are left.

What a deployment would protect: a user from all other users, by its mask u_i, which they do not know; and
from the server with T colluding users of one group, by r: they see 2 T values of f_i, and with N > 2 T these
fit with every x_i. So T is up to half of a group, and the groups are drawn in each round, so that colluders
do not choose to be in one. The server and one user of group l together also learn the sum over all users of
the groups before l - 1, so a group hides its users among each other. All follow the protocol, and users'
messages to each other go through channels that nobody else reads. The server learns the sum over those left
and the sum of their weights; what *that* says of one user is differential privacy's part.

A round whose sum cannot be found leaves the model as it is.

Letters: P trained parameters, U users of a cohort, L groups, N users of a group, T colluding users.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from pfl_ext.algorithms.algorithm import Setup, Traffic, register, trained_bytes
from pfl_ext.algorithms.finite_field import (
    BYTES,
    KEY_BYTES,
    PRIME,
    Elements,
    combine,
    fresh,
    inverse,
    lagrange,
    uniform,
)
from pfl_ext.algorithms.secure_sum import SecureSum, SecureSumOptions, Sent, SumLost, unwatched
from pfl_ext.configs import STRICT
from pfl_ext.randomness import stream

Place = int
"""Position of a user in the cohort."""


@dataclass(frozen=True, config=STRICT)
class TurboOptions(SecureSumOptions):
    """Also the groups."""

    group_size: Annotated[int, Field(ge=2)] = 5
    """Least users of a group; there are as many groups as that allows, of sizes that differ by 1 at most."""
    lost_of: Literal["groups", "cohort"] = "groups"
    """Where drop_out is drawn: the same share of each group, or of the cohort, where a group may lose more
    than half of its users, and the round with them."""


def points_of(size: int) -> tuple[list[int], list[int]]:
    """alpha and beta of a group of so many users."""
    return list(range(1, size + 1)), list(range(size + 1, 2 * size + 1))


def spread(masked: Elements, size: int) -> tuple[Elements, Elements]:
    """What a user sends to the next group of N users because of its ``x + u``, ``[P + 1]``.

    Returns:
        ``x_ij`` and ``f_i(beta_j)``, each ``[N, P + 1]``. The mean of the first is ``x + u``; any 2 T < N of
        these 2 N vectors are independent of it and uniform.
    """
    alpha, beta = points_of(size)
    values = np.empty((size, len(masked)), np.int64)
    for row in values[:-1]:  # that all but one are uniform and the mean is fixed is the same as a uniform r
        row[:] = fresh(len(masked))
    values[-1] = (size * masked - values[:-1].sum(0)) % PRIME
    return values, combine(lagrange(beta, alpha), values)


def mean_of(shares: Elements) -> Elements:
    """``[P + 1]``, the mean in the field of a group's shares ``[N, P + 1]``."""
    mean: Elements = shares.sum(0) % PRIME * inverse(len(shares)) % PRIME
    return mean


def completed(group: Sequence[Place], held: Mapping[Place, tuple[Elements, Elements]]) -> Elements:
    """All N shares ``[N, P + 1]`` of a group, from what those of it who are left hold: s and t each.

    Raises:
        SumLost: when more than half of the group is lost.
    """
    alpha, beta = points_of(len(group))
    known: list[int] = []
    values: list[Elements] = []
    for index, place in enumerate(group):
        if place in held:
            known += [alpha[index], beta[index]]
            values += held[place]
    if len(known) < len(group):
        raise SumLost(
            f"of a group of {len(group)} users {len(known) // 2} are left, and {-(-len(group) // 2)} are "
            "needed"
        )
    known, values = known[: len(group)], values[: len(group)]
    return combine(lagrange(alpha, known), np.stack(values))


@plain_dataclass
class Incoming:
    """What the users of a group have got from the group before, by place."""

    shares: dict[Place, tuple[Elements, Elements]] = field(default_factory=dict)
    """s and t of each user of the group before who is left."""
    parts: dict[Place, list[tuple[Elements, Elements]]] = field(default_factory=dict)
    """For each user of this group, ``x_ji`` and ``f_j(beta_i)`` of each user j of the group before."""


def circle_sum(
    vectors: Mapping[Place, Elements], groups: Sequence[Sequence[Place]], sent: Sent = unwatched
) -> Elements:
    """The sum of the vectors of those who are left, by the whole protocol.

    Args:
        vectors: ``[P + 1]`` of each user who is left. The others are lost once the server gave them masks.
        groups: everybody's place, by group.
        sent: is called with each message.

    Raises:
        SumLost: when more than half of a group is lost.
    """
    size = len(next(iter(vectors.values())))
    keys = {place: secrets.token_bytes(KEY_BYTES) for group in groups for place in group}
    for place, key in keys.items():
        sent(None, place, "mask", key)
    before: Sequence[Place] = ()
    incoming = Incoming()
    for group, after in zip([*groups, groups[0]], [*groups[1:], groups[0], ()]):
        held = _held(group, before, incoming, vectors, size)
        if not after:
            for place, shares in held.items():
                sent(place, None, "end", shares)
            total = mean_of(completed(group, held))
            break
        incoming = Incoming(held, {place: [] for place in after})
        for place in group:
            if place not in vectors:
                continue
            masked = (vectors[place] + uniform(keys[place], size)) % PRIME
            for receiver, *pair in zip(after, *spread(masked, len(after))):
                sent(place, receiver, "parts", (*pair, *(held[place] if before else ())))
                incoming.parts[receiver].append((pair[0], pair[1]))
        before = group
    for place in vectors:
        total -= uniform(keys[place], size)
    return total % PRIME


def _held(
    group: Sequence[Place],
    before: Sequence[Place],
    incoming: Incoming,
    vectors: Mapping[Place, Elements],
    size: int,
) -> dict[Place, tuple[Elements, Elements]]:
    """s and t ``[P + 1]`` of each user of a group who is left; zeros where nobody was before."""
    so_far = mean_of(completed(before, incoming.shares)) if before else np.zeros(size, np.int64)
    held = {}
    for place in group:
        if place in vectors:
            own, coded = so_far.copy(), so_far.copy()
            for part, coded_part in incoming.parts.get(place, ()):
                own += part
                coded += coded_part
            held[place] = own % PRIME, coded % PRIME
    return held


@register("turbo_aggregate")
class TurboAggregate(SecureSum):
    """The protocol of groups in a circle."""

    options: ClassVar[type] = TurboOptions

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Also refuse groups that are too small, and rounds that would all be lost.

        Raises:
            ValueError: one line with the reason.
        """
        super().check(setup)
        options, users = setup.options, setup.cohort_size
        if users < options.group_size:
            raise ValueError(
                f"federated.options.group_size is {options.group_size}, and a cohort has {users} users: "
                f"lower it, or raise federated.cohort_size"
            )
        smallest = users // (users // options.group_size)
        colluding = 1 if options.colluding is None else options.colluding
        if 2 * colluding >= smallest:
            raise ValueError(
                f"a group of {smallest} users hides their updates from {(smallest - 1) // 2} colluding ones "
                f"and the server, not from {colluding}: set federated.options.group_size to "
                f"{2 * colluding + 1} or more"
            )
        if options.drop_out > 0.5:
            raise ValueError(
                f"federated.options.drop_out is {options.drop_out:g}, and a group's sum is lost with more "
                "than half of its users: set it to at most 0.5"
            )

    def groups(self, users: int, number: int) -> list[list[Place]]:
        """The places of a cohort's users by group, drawn from the run's seed and the round."""
        order = stream(self.means.seed, "groups of users", number).permutation(users)
        count = users // self.means.options.group_size
        return [part.tolist() for part in np.array_split(order, count)]

    def lost(self, users: int, number: int) -> list[int]:
        """The users who are lost: the same share of each group, or some of the cohort."""
        if self.means.options.lost_of == "cohort":
            return self.drawn(np.arange(users), number)
        groups = self.groups(users, number)
        return [
            place for key, group in enumerate(groups) for place in self.drawn(np.array(group), number, key)
        ]

    def total(self, vectors: Mapping[int, Elements], users: int, number: int) -> Elements:
        """The sum, passed from group to group."""
        return circle_sum(vectors, self.groups(users, number))

    def bytes(self, state: Any) -> Traffic:
        """The mean over the users of what each gets and sends, to other users too, where nobody is lost."""
        users, element = self.means.cohort_size, BYTES * self.elements
        sizes = [len(group) for group in self.groups(users, 0)]
        between = 0
        for place, (own, after) in enumerate(zip(sizes, [*sizes[1:], sizes[0]])):
            between += own * after * element * (2 if place == 0 else 4)
        end = 2 * element * sizes[0]
        down = trained_bytes(self.means.module) + KEY_BYTES + -(-between // users)
        return Traffic(down, -(-(between + end) // users))
