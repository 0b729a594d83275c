"""FedAvg whose sum over users is computed in a finite field, so that the server sees no single update.

A user has an update x ``[P]`` and a weight w (its number of images, or 1). Its input to the protocol is P + 1
elements of `pfl_ext.algorithms.finite_field`: ``w x`` in fixed point with b bits after the binary point,
after each number of x was clipped to -C..C; and w. The server learns the sum of these inputs over the users
who were not lost. Dividing the sum of ``w x`` by the sum of w gives the weighted mean, and no single weight
is revealed. The server's optimiser steps on that mean, as in FedAvg.

Each number of the mean differs by at most ``U / (2 2^b sum w)`` from the exact mean of the clipped updates of
U users, since each user rounds to nearest; a test computes this. Sums must not wrap around. A run is refused
before it begins unless ``sum w C 2^b + U/2 <= (q - 1) / 2`` for the largest weight of a possible cohort.

Masks come from the operating system's generator and not from the run's seed. They cancel exactly in the
field, so the model is still a function of config and data: it is the same to the bit after a resume, and on
any number of workers. The lost users are drawn from (seed, round).

The protocol is simulated: all parties run one after another in one process, share its memory, and send
nothing over a network. So a run protects nobody. It shows what a deployment would compute and send, and which
losses it would survive. A lost user makes the protocol's first steps, but its update never arrives. Lost
users do not train here, since their updates are not in the sum.

Letters: P trained parameters, U users of a cohort.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from pfl_ext.algorithms.algorithm import RunContext, Setup
from pfl_ext.algorithms.clients import Clients
from pfl_ext.algorithms.finite_field import MOST_BITS, Elements, decode, encode, most_bits
from pfl_ext.algorithms.flat_variables import FlatVariables
from pfl_ext.algorithms.server_model import ServerModelAlgorithm
from pfl_ext.configs import STRICT, Fraction, rounded_down
from pfl_ext.randomness import stream
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals
from pfl_ext.workers.distributed import is_main

Sent = Callable[[int | None, int | None, str, Any], None]
"""Is called with each message: its sender, its receiver (None: the server), its kind and its content."""


def unwatched(sender: int | None, receiver: int | None, what: str, content: Any) -> None:
    """Do nothing with a message."""


class SumLost(Exception):
    """Too many users were lost, so the sum of the others cannot be computed. The message is one line."""


@dataclass(frozen=True, config=STRICT)
class SecureSumOptions:
    """Options that both protocols share."""

    fraction_bits: Annotated[int, Field(ge=0, le=MOST_BITS)] | None = None
    """b, the bits after the binary point of a number; none: the most with which no sum wraps around."""
    clip: PositiveFloat = 4.0
    """C: each number of an update is clipped to -C..C before the sum."""
    drop_out: Fraction = 0.0
    """Share of the users, rounded down, whose update is lost after they shared their keys."""
    colluding: Annotated[int, Field(ge=1)] | None = None
    """T, users who, even with the server, learn nothing of others; none: most with which half may be lost."""


class SecureSum(ServerModelAlgorithm):
    """FedAvg over a protocol that adds up vectors of field elements. Each round has new keys."""

    options: ClassVar[type] = SecureSumOptions
    refusals: ClassVar[Refusals] = {
        **PRIVACY_NOT_ARGUED,
        "replacement": (
            "in a secure sum each user has its own key, so a user must not be drawn twice in a cohort: set "
            "federated.replacement to false"
        ),
    }
    idle_in_runtime: ClassVar[str] = "reduce"

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients, self.bits = Clients(context), bits_of(context)

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse options with which a sum could wrap around.

        Raises:
            ValueError: one line with the most bits that are allowed.
        """
        bits_of(setup)

    @abstractmethod
    def lost(self, users: int, number: int) -> list[int]:
        """The places in a cohort of ``users`` users of those who are lost in a round."""

    @abstractmethod
    def total(self, vectors: Mapping[int, Elements], users: int, number: int) -> Elements:
        """The sum by the protocol, in a round.

        Args:
            vectors: ``[P + 1]`` of each user who is not lost, by its place in the cohort.
            users: the size of the cohort, with lost users.
            number: the round.

        Raises:
            SumLost: when too many were lost.
        """

    def drawn(self, places: np.ndarray[Any, Any], number: int, *keys: int) -> list[int]:
        """A share `drop_out` of these places, drawn from the run's seed and the round."""
        rng = stream(self.context.seed, "users lost in secure sums", number, *keys)
        count = rounded_down(self.context.options.drop_out, len(places))
        return sorted(int(place) for place in rng.permutation(places)[:count])

    def round(self, state: PyTorchModel, number: int) -> tuple[PyTorchModel, dict[str, Any]]:
        """Train the users who are not lost, compute their sum, and step on its mean."""
        cohort, users = self.clients.cohort(number), self.context.users
        lost = set(self.lost(len(cohort), number))
        left = [place for place in range(len(cohort)) if place not in lost]
        weights = users.images[cohort[left]].tolist() if self.context.by_images else [1] * len(left)
        start = self.clients.weights()
        variables = FlatVariables(self.context.module, list(start))
        updates, line = self.clients.each_update([start] * len(left), cohort[left], number)
        clipped, vectors = 0, {}
        for place, weight, update in zip(left, weights, updates):
            flat = variables.flat(update).double().cpu().numpy()
            clipped += int((np.abs(flat) > self.context.options.clip).sum())
            numbers = encode(flat, weight, self.bits, self.context.options.clip)
            vectors[place] = np.append(numbers, weight)
        line |= {"lost": len(lost), "clipped": clipped, "skipped": 0}
        try:
            total = self.total(vectors, len(cohort), number)
        except SumLost as reason:
            if is_main():
                print(f"round {number} does not change the model: {reason}", file=sys.stderr)
            return self.clients.model(start), line | {"skipped": 1}
        mean = decode(total[:-1], self.bits) / max(int(total[-1]), 1)
        parts = variables.named(torch.from_numpy(mean).to(variables.device))
        update = {name: part.to(start[name].dtype) for name, part in parts.items()}
        return state, line | {"learning_rate": self.clients.server_step(start, update, number)}

    @property
    def elements(self) -> int:
        """Number of field elements of a user's input: P numbers and its weight."""
        return 1 + sum(p.numel() for p in self.context.module.parameters() if p.requires_grad)


def bits_of(setup: Setup) -> int:
    """b, the bits after the binary point in a run.

    Raises:
        ValueError: one line, when the sum of the heaviest cohort could wrap around.
    """
    users, options = setup.users, setup.options
    count = min(setup.cohort_size, users.num_users)
    weight = int(np.sort(users.images)[-count:].sum()) if setup.by_images else count
    most = most_bits(weight, count, options.clip)
    if most < 0:
        raise ValueError(
            f"a secure sum of {count:,} users with a total weight of {weight:,} and numbers up to "
            f"federated.options.clip = {options.clip:g} does not fit below 2^31: lower clip, or set "
            "federated.weighting to users"
        )
    if options.fraction_bits is not None and options.fraction_bits > most:
        raise ValueError(
            f"federated.options.fraction_bits is {options.fraction_bits}, with which a sum of {count:,} "
            f"users with a total weight of {weight:,} and numbers up to {options.clip:g} could "
            f"overflow: set it to at most {most}, or lower federated.options.clip"
        )
    return most if options.fraction_bits is None else int(options.fraction_bits)
