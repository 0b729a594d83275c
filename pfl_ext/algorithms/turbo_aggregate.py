"""Turbo-Aggregate (So, Guler and Avestimehr 2020, "Turbo-Aggregate: Breaking the Quadratic Aggregation
Barrier in Secure Federated Learning", arXiv 2002.04156, Section IV): FedAvg whose sum goes from group to
group.

The U users of a round are divided at random into L groups of N. Group 1 begins, each group sends to the next,
and group L sends to group 1, which closes the circle. With q and its arithmetic in
`pfl_ext.algorithms.finite_field`, user i of group l

* has a mask u_i, known only to itself and the server, and draws r_ij with ``sum_j r_ij = 0`` over the users j
  of group l + 1. It sends ``x_ij = x_i + u_i + r_ij`` to each j;
* computes the polynomial f_i of degree below N with ``f_i(alpha_j) = x_ij``, and sends ``f_i(beta_j)`` to
  each j, at a point of j's own. This is the redundancy (Lagrange coding);
* holds a share s_i of the sum so far. It is the mean of the shares of group l - 1 plus what the users of
  group l - 1 sent to it, ``s_i = mean_j s_j + sum_j x_ji``. In the same way it holds a coded share t_i at its
  beta. It sends both to each user of group l + 1.

The shares s of a group are the values at alpha of one polynomial of degree below N, and the coded shares t
are its values at beta. So group l + 1 can compute all s from any N of these 2 N numbers: if up to half of
each group is lost, only their own updates are missing. The r cancel in the mean over a group, so
``mean_i s_i = sum x_j + u_j`` over all remaining users of earlier groups. Group 1 sends the final shares to
the server, which completes them and subtracts the masks of the remaining users.

What a deployment would protect: the mask u_i hides a user's update from all other users. r hides it from the
server together with T colluding users of one group: they see 2 T values of f_i, and with N > 2 T these fit
every x_i. So T is below half of a group, and groups are drawn in each round, so that colluders cannot choose
to share one. The server and one user of group l together also learn the sum over all users of the groups
before l - 1, so a user is hidden among those of its group. All parties are assumed to follow the protocol,
and users' messages to each other to be secret. The server learns the sum over remaining users and the sum of
their weights; what *that* reveals of one user is the task of differential privacy.

A round whose sum cannot be computed leaves the model unchanged.

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
    """`SecureSumOptions` and those of the groups."""

    group_size: Annotated[int, Field(ge=2)] = 5
    """Minimum size of a group. There are as many groups as it allows, and their sizes differ by at most 1."""
    lost_of: Literal["groups", "cohort"] = "groups"
    """Whether drop_out is a share of each group, or of the cohort. In the latter case a group may lose more
    than half of its users, which loses the round."""


def points_of(size: int) -> tuple[list[int], list[int]]:
    """The points alpha and beta of a group of ``size`` users."""
    return list(range(1, size + 1)), list(range(size + 1, 2 * size + 1))


def spread(masked: Elements, size: int) -> tuple[Elements, Elements]:
    """The vectors that a user sends to the next group of N users for its ``x + u``, ``[P + 1]``.

    Returns:
        ``x_ij`` and ``f_i(beta_j)``, each ``[N, P + 1]``. The mean of the first is ``x + u``. Any 2 T < N of
        these 2 N vectors are uniform and independent of it.
    """
    alpha, beta = points_of(size)
    values = np.empty((size, len(masked)), np.int64)
    for row in values[:-1]:  # uniform rows, all but one, and a fixed mean: the same as a uniform r
        row[:] = fresh(len(masked))
    values[-1] = (size * masked - values[:-1].sum(0)) % PRIME
    return values, combine(lagrange(beta, alpha), values)


def mean_of(shares: Elements) -> Elements:
    """The mean ``[P + 1]``, in the field, of a group's shares ``[N, P + 1]``."""
    mean: Elements = shares.sum(0) % PRIME * inverse(len(shares)) % PRIME
    return mean


def completed(group: Sequence[Place], held: Mapping[Place, tuple[Elements, Elements]]) -> Elements:
    """All N shares ``[N, P + 1]`` of a group, from the s and t of its remaining users.

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
    """What the users of a group received from the group before, by place."""

    shares: dict[Place, tuple[Elements, Elements]] = field(default_factory=dict)
    """s and t of each remaining user of the group before."""
    parts: dict[Place, list[tuple[Elements, Elements]]] = field(default_factory=dict)
    """For each user of this group, ``x_ji`` and ``f_j(beta_i)`` of each user j of the group before."""


def circle_sum(
    vectors: Mapping[Place, Elements], groups: Sequence[Sequence[Place]], sent: Sent = unwatched
) -> Elements:
    """The sum of the remaining users' vectors, by the whole protocol.

    Args:
        vectors: ``[P + 1]`` of each remaining user. The others are lost after the server gave them masks.
        groups: the places of all users, by group.
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
    """s and t ``[P + 1]`` of each remaining user of a group; zeros where no group was before."""
    so_far = mean_of(completed(before, incoming.shares)) if before else np.zeros(size, np.int64)
    held = {}
    for place in group:
        if place in vectors:
            plain, coded = so_far.copy(), so_far.copy()
            for part, coded_part in incoming.parts.get(place, ()):
                plain += part
                coded += coded_part
            held[place] = plain % PRIME, coded % PRIME
    return held


@register("turbo_aggregate")
class TurboAggregate(SecureSum):
    """FedAvg whose sum is passed around a circle of groups."""

    options: ClassVar[type] = TurboOptions

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what `SecureSum` refuses, groups that are too small, `lost_of` without effect, and
        runs that would lose every round.
        """
        super().check(setup)
        options, users = setup.options, setup.cohort_size
        if users < options.group_size:
            raise ValueError(
                f"federated.options.group_size is {options.group_size}, but a cohort has only {users} "
                "users: lower it, or raise federated.cohort_size"
            )
        smallest = users // (users // options.group_size)
        colluding = 1 if options.colluding is None else options.colluding
        if 2 * colluding >= smallest:
            raise ValueError(
                f"a group of {smallest} users hides their updates from the server and up to "
                f"{(smallest - 1) // 2} colluding users, not from {colluding}: set "
                f"federated.options.group_size to {2 * colluding + 1} or more"
            )
        if not options.drop_out and options.lost_of != TurboOptions.lost_of:
            raise ValueError(
                "federated.options.lost_of has no effect if federated.options.drop_out is 0: set drop_out "
                "above 0, or leave lost_of out"
            )
        if options.drop_out > 0.5:
            raise ValueError(
                f"federated.options.drop_out is {options.drop_out:g}, but a group's sum is lost if more "
                "than half of its users drop out: set it to at most 0.5"
            )

    def groups(self, users: int, number: int) -> list[list[Place]]:
        """The places of a cohort's users, by group, drawn from the run's seed and the round."""
        order = stream(self.context.seed, "groups of users", number).permutation(users)
        count = users // self.context.options.group_size
        return [part.tolist() for part in np.array_split(order, count)]

    def lost(self, users: int, number: int) -> list[int]:
        """The users who are lost: a share of each group, or of the whole cohort."""
        if self.context.options.lost_of == "cohort":
            return self.drawn(np.arange(users), number)
        groups = self.groups(users, number)
        return [
            place for key, group in enumerate(groups) for place in self.drawn(np.array(group), number, key)
        ]

    def total(self, vectors: Mapping[int, Elements], users: int, number: int) -> Elements:
        """The sum, passed from group to group."""
        return circle_sum(vectors, self.groups(users, number))

    def bytes(self, state: Any) -> Traffic:
        """The mean over users of what each receives and sends, also from and to users, if none is lost."""
        users, element = self.context.cohort_size, BYTES * self.elements
        sizes = [len(group) for group in self.groups(users, 0)]
        between = 0
        for place, (size, following) in enumerate(zip(sizes, [*sizes[1:], sizes[0]])):
            between += size * following * element * (2 if place == 0 else 4)
        end = 2 * element * sizes[0]
        down = trained_bytes(self.context.module) + KEY_BYTES + -(-between // users)
        return Traffic(down, -(-(between + end) // users))
