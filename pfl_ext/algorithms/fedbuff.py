"""FedBuff: asynchronous training, in which the server steps on a buffer of K updates as they arrive
(Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Algorithm 1,
arXiv 2106.06639).

At most M users train at a time (``concurrency``), each from the version of the model that was newest when it
started, and each at most once in flight. The server's buffer takes ``s(tau) u_i``: u_i is the update of the
local training of user i, tau the number of server steps since i's start, ``s(tau) = 1 / sqrt(1 + tau)``. Once
it has K updates (``federated.cohort_size``) the server's optimiser steps on

    d = sum_i s(tau_i) w_i u_i / sum_i w_i

with w_i = 1 as in the paper (``federated.weighting: users``), which divides by K, or a user's images. The
staleness is not in the divisor, so that old updates make a small step. Then the version grows by one and the
buffer is empty: a server step is a round of the run. With M = K = 1 this is FedAvg with a cohort of one.

When users arrive is a matter of the run's ``devices`` (`pfl_ext.devices.arrivals`): the order of all events
is known before training, so that the K users of a step are a cohort, trained together by versions, and a
run is the same on any number of workers and after a resume. A version of the model is kept as long as some
later step needs it: at most ``max_staleness + 1`` of them. A user who trains twice for one step draws other
batches the second time. Learning rates are those of the round in which a user starts.

Not for private training: who is in a buffer follows from how fast users are, which is no sampling that
amplifies privacy, and from their numbers of images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import Algorithm, Means, Setup, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.configs import STRICT
from pfl_ext.devices.arrivals import Job, ServerStep, server_steps
from pfl_ext.devices.config import DevicesConfig
from pfl_ext.devices.fleet import Fleet, Sent
from pfl_ext.rules import Refusals

VERSIONS = "versions/"
"""Before the number of a version and the name of a variable in a checkpoint."""


@checked_dataclass(frozen=True, config=STRICT)
class FedBuffOptions:
    """How many users train at a time, and how old an update may be; the buffer is federated.cohort_size."""

    concurrency: PositiveInt = 10
    """M: users in flight at any time."""
    max_staleness: NonNegativeInt | None = None
    """Server steps since its start after which an update is dropped; none: all are taken."""


@dataclass
class Buffered:
    """The model with the server's optimiser, and the versions that users in flight have started from."""

    model: PyTorchModel
    versions: dict[int, Weights]


@register("fedbuff")
class FedBuff(Algorithm[Buffered]):
    """A round is a step of the server."""

    options: ClassVar[type] = FedBuffOptions
    takes_devices: ClassVar[bool] = True
    refusals: ClassVar[Refusals] = {
        "privacy": "the order in which users arrive is no random sampling, and depends on how many images "
        "they have: choose algorithm fedavg or fedprox for private training",
        "replacement": "FedBuff has a user at most once in flight: set federated.replacement to false",
        "proportional": "FedBuff draws users alike: set federated.sampling to uniform",
    }

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        assert means.devices is not None
        self.clients, users, options = Clients(means), means.users, means.options
        self.sent = Sent(*self.bytes(Buffered(means.model, {})))
        fleet = Fleet(means.devices, users.partition.user_ids, means.seed)
        everybody, sizes = np.arange(users.num_users), users.sizes
        seconds = fleet.seconds(everybody, users.sampling.image_passes(sizes), self.sent)
        self.steps: list[ServerStep] = server_steps(
            seconds,
            concurrency=options.concurrency,
            buffer=means.cohort_size,
            max_staleness=options.max_staleness,
            drop_out=means.devices.drop_out,
            num_steps=means.num_rounds,
            seed=means.seed,
        )
        self._last_use = {job.version: t for t, step in enumerate(self.steps) for job in step.jobs}
        self._weights = users.sampling.taking_part(sizes) if means.by_images else np.ones(len(sizes))

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse a run without a clock, or with what is said of rounds that have a cohort.

        Raises:
            ValueError: one line.
        """
        devices, plain = setup.devices, DevicesConfig()
        if devices is None or not devices.has_clock:
            raise ValueError(
                "fedbuff takes updates in the order of their arrival, which needs speeds: give "
                "devices.classes or devices.capacities"
            )
        for key in ("deadline_s", "late", "over_selection", "stragglers", "availability"):
            if getattr(devices, key) != getattr(plain, key):
                raise ValueError(
                    f"devices.{key} is about rounds that begin and end, and fedbuff has none: leave it out"
                )
        if setup.options.concurrency > setup.users.num_users:
            raise ValueError(
                f"federated.options.concurrency is {setup.options.concurrency} and there are "
                f"{setup.users.num_users} users, each at most once in flight: set it to at most that"
            )

    def init(self, seed: int) -> Buffered:
        """The run's model, whose weights were drawn from the run's seed, as the version 0."""
        return Buffered(self.means.model, {0: self.clients.weights()})

    def round(self, state: Buffered, number: int) -> tuple[Buffered, dict[str, Any]]:
        """Train the users whose updates fill the buffer, by versions, and make the server's step."""
        step, x = self.steps[number], state.versions[number]
        total = {name: torch.zeros_like(w) for name, w in x.items()}
        whole = sum(float(self._weights[job.user]) for job in step.jobs)
        images, losses = 0, list[tuple[int, float]]()
        for version, jobs in _by_version(step.jobs).items():
            users = np.array([job.user for job, _ in jobs], np.int64)
            turns = np.array([turn for _, turn in jobs], np.int64)
            start = state.versions[version]
            update, seen = self.clients.mean_update(start, users, version, draws=number, turns=turns)
            weight = float(self._weights[users].sum())
            if weight:
                factor = (1 + number - version) ** -0.5 * (weight / whole)
                for name, sum_ in total.items():
                    sum_.add_(update[name], alpha=factor)
            images += seen["images"]
            losses += [(seen["images"], seen["train_loss"])] if "train_loss" in seen else []
        rate = self.clients.server_step(x, total, number)
        state.versions[number + 1] = self.clients.weights()
        kept = {v: w for v, w in state.versions.items() if v > number or self._last_use.get(v, 0) > number}
        line: dict[str, Any] = {"users": len(step.jobs), "images": images, "learning_rate": rate}
        if losses:
            seen_images = sum(count for count, _ in losses)
            line["train_loss"] = round(sum(count * loss for count, loss in losses) / seen_images, 6)
        return Buffered(state.model, kept), line | self._events(number)

    def _events(self, number: int) -> dict[str, Any]:
        """What ``metrics.jsonl`` says of the time up to a step."""
        step = self.steps[number]
        ages = [number - job.version for job in step.jobs]
        ended = len(step.jobs) + step.stale
        return {
            "selected": ended + step.lost,
            "reported": ended,
            "lost": step.lost,
            "late": step.stale,
            "staleness": round(sum(ages) / len(ages), 4),
            "max_staleness": max(ages),
            "bytes_down": (ended + step.lost) * self.sent.down,
            "bytes_up": ended * self.sent.up,
            "virtual_seconds": round(step.end, 4),
        }

    def model(self, state: Buffered) -> PyTorchModel:
        """The newest version."""
        return state.model

    def tensors(self, state: Buffered) -> dict[str, Tensor]:
        """Of the model, the server's optimiser and the versions; the buffer is empty between rounds."""
        kept = {
            f"{VERSIONS}{version}/{name}": tensor
            for version, weights in state.versions.items()
            for name, tensor in weights.items()
        }
        return checkpoint.model_tensors(state.model) | kept

    def load(self, state: Buffered, tensors: Mapping[str, Tensor]) -> Buffered:
        """Put all of it back."""
        checkpoint.restore_model(state.model, tensors)
        device = next(iter(state.model.variable_map.values())).device
        versions: dict[int, Weights] = {}
        for key, tensor in checkpoint.part(tensors, VERSIONS).items():
            version, _, name = key.partition("/")
            versions.setdefault(int(version), {})[name] = tensor.to(device)
        return Buffered(state.model, versions)


def _by_version(jobs: tuple[Job, ...]) -> dict[int, list[tuple[Job, int]]]:
    """The jobs of a step by the version that they start from, each with how many of its user came before."""
    turns, found = Counter[int](), dict[int, list[tuple[Job, int]]]()
    for job in jobs:
        found.setdefault(job.version, []).append((job, turns[job.user]))
        turns[job.user] += 1
    return dict(sorted(found.items()))
