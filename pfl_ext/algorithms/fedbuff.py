"""FedBuff: asynchronous training, in which the server steps on a buffer of K updates as they arrive
(Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Algorithm 1,
arXiv 2106.06639).

At any time M different users train (``concurrency``), each from the version of the model that was newest when
it started. u_i is the update of user i, and tau_i the number of server steps since it started. Once the
buffer has K updates (``buffer_size``), the server's optimiser steps on

    d = sum_i s(tau_i) w_i u_i / sum_i w_i,    s(tau) = 1 / sqrt(1 + tau)    (constant: s = 1)

with w_i the number of user i's images, or 1 as in the paper (``federated.weighting: users``), which makes the
divisor K. s is not in the divisor, so old updates make a small step. After the step the model has a new
version, and the buffer is empty. A server step is a round of the run. M = K = 1 is FedAvg with cohorts of
one.

Arrival times follow from the run's ``devices`` (`pfl_ext.devices.arrivals`) and not from anything trained. So
the K users of every step are known in advance, and a step trains them together, each from its own version.
This makes a run the same on any number of workers and after a resume. A version is kept, also in checkpoints,
until the last step that needs it: at most M old versions and the newest.

Users who start from the same version and arrive for the same step draw their batches as a round of their
own, so that no user draws the same batches twice. The local learning rate is that of the round in which a
user starts; the server's is that of the step.

Privacy is refused: which users are in a buffer depends on their speed and on how many images they have, so it
is no random sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import Algorithm, RunContext, Setup, register, trained_bytes
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.configs import STRICT
from pfl_ext.devices.arrivals import ServerStep, server_steps
from pfl_ext.devices.config import DevicesConfig
from pfl_ext.devices.fleet import Fleet
from pfl_ext.models.memory import refuse_beyond_memory
from pfl_ext.rules import Refusals

VERSIONS = "versions/"
"""Prefix in a checkpoint, before the number of a version and the name of a variable."""
OF_ROUNDS = ("deadline_s", "over_selection", "stragglers", "availability")
"""Keys of ``devices`` that have a meaning only for rounds with a cohort."""


@checked_dataclass(frozen=True, config=STRICT)
class FedBuffOptions:
    """How many users train at a time, how many updates make a step, and the weight of old updates."""

    concurrency: PositiveInt = 10
    """M, the number of users who train at the same time; at most all users."""
    buffer_size: PositiveInt = 10
    """K, the number of updates for a step of the server, which is a round."""
    staleness_weight: Literal["inverse_sqrt", "constant"] = "inverse_sqrt"
    """Weight s of an update that is tau server steps old: 1 / sqrt(1 + tau), or 1."""
    max_staleness: NonNegativeInt | None = None
    """Maximum age in server steps at which an update is still used; none: all are used."""


@dataclass
class Buffered:
    """The model with the server's optimiser, and the versions that later steps need, by number."""

    model: PyTorchModel
    versions: dict[int, Weights]


@register("fedbuff")
class FedBuff(Algorithm[Buffered]):
    """Buffered asynchronous training. A round is one step of the server."""

    options: ClassVar[type] = FedBuffOptions
    takes: ClassVar[tuple[str, ...]] = ("devices",)
    has_server_model: ClassVar[bool] = True
    idle: ClassVar[str] = "federated.cohort_size"
    reads_length: ClassVar[bool] = True
    refusals: ClassVar[Refusals] = {
        "privacy": (
            "users take part in the order in which they arrive, which is not random and depends on how "
            "many images they have: choose algorithm fedavg or fedprox for private training"
        ),
        "replacement": "FedBuff never trains a user twice at one time: set federated.replacement to false",
        "proportional": "FedBuff draws all users with equal probability: set federated.sampling to uniform",
    }

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        context.applied.add("devices")
        users = context.users
        self.clients, self.sent = Clients(context), self.traffic(context.module)
        self.steps, self._last_use = self._schedule(context)
        groups = [len(step.by_version()) for step in self.steps]
        self._groups_before = np.cumsum([0, *groups]).tolist()
        self._weights = users.images.astype(float) if context.by_images else np.ones(users.num_users)

    @classmethod
    def _schedule(cls, setup: Setup) -> tuple[list[ServerStep], dict[int, int]]:
        """The server's steps, and the last of them that uses each version of the model."""
        assert setup.devices is not None
        users, options = setup.users, setup.options
        fleet = Fleet(setup.devices, users.partition.user_ids, setup.seed)
        steps = server_steps(
            fleet.seconds(np.arange(users.num_users), users.passes, cls.traffic(setup.module)),
            concurrency=options.concurrency,
            buffer_size=options.buffer_size,
            max_staleness=options.max_staleness,
            drop_out=setup.devices.drop_out,
            num_steps=setup.num_rounds,
            seed=setup.seed,
        )
        return steps, {version: t for t, step in enumerate(steps) for version in step.by_version()}

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse a run without a clock, with keys of ``devices`` about cohorts, with more concurrent users
        than there are, or with versions that do not fit in memory.
        """
        devices, plain = setup.devices, DevicesConfig()
        if devices is None or not devices.has_clock:
            raise ValueError(
                "fedbuff uses updates in the order in which devices send them, so it needs the speeds "
                "of devices: set devices.classes or devices.capacities"
            )
        for key in OF_ROUNDS:
            if getattr(devices, key) != getattr(plain, key):
                raise ValueError(
                    f"devices.{key} applies to rounds with a cohort, which fedbuff does not have: leave "
                    "it out"
                )
        if setup.options.concurrency > setup.users.num_users:
            raise ValueError(
                f"federated.options.concurrency is {setup.options.concurrency}, but there are only "
                f"{setup.users.num_users} users, each at most once at a time: set it to at most "
                f"{setup.users.num_users}"
            )
        oldest = setup.options.max_staleness
        if oldest == 0 and setup.options.staleness_weight != FedBuffOptions.staleness_weight:
            raise ValueError(
                "federated.options.staleness_weight has no effect if federated.options.max_staleness is 0, "
                "as no update is old then: raise max_staleness, or leave staleness_weight out"
            )
        most = setup.options.concurrency if oldest is None else min(setup.options.concurrency, oldest)
        refuse_beyond_memory(
            (most + 1) * trained_bytes(setup.module),
            f"fedbuff keeps up to {most + 1:,} versions of the model",
            "lower federated.options.concurrency or federated.options.max_staleness",
        )

    @classmethod
    def state_bytes(cls, setup: Setup) -> int:
        """In each checkpoint the versions, at most as many as are needed after any one step."""
        steps, last_use = cls._schedule(setup)
        change = np.zeros(len(steps) + 1, np.int64)
        for version, last in last_use.items():
            change[version] += 1
            change[last] -= 1
        return checkpoint.CHECKPOINTS * (1 + int(change.cumsum().max())) * trained_bytes(setup.module)

    def init(self, seed: int) -> Buffered:
        """The run's model, whose weights were drawn from the run's seed, as version 0."""
        return Buffered(self.context.model, {0: self.clients.weights()})

    def round(self, state: Buffered, number: int) -> tuple[Buffered, dict[str, Any]]:
        """Train the users of a buffer, each from its own version, and make the server's step."""
        step, newest = self.steps[number], state.versions[number]
        total = {n: torch.zeros_like(w, dtype=self.context.accumulate) for n, w in newest.items()}
        whole = sum(float(self._weights[job.user]) for job in step.jobs)
        seen: list[dict[str, Any]] = []
        for place, (version, users) in enumerate(step.by_version().items()):
            draws = self._groups_before[number] + place
            update, line = self.clients.mean_update(state.versions[version], users, version, draws=draws)
            seen.append(line)
            weight = float(self._weights[users].sum())
            if weight:
                share = self._staleness_weight(number - version) * weight / whole
                for name, sum_ in total.items():
                    sum_.add_(update[name], alpha=share)
        rate = self.clients.server_step(newest, total, number)
        kept = {v: w for v, w in state.versions.items() if self._last_use.get(v, number) > number}
        kept[number + 1] = self.clients.weights()
        line = {"users": len(step.jobs), "images": sum(each["images"] for each in seen)}
        trained = [each for each in seen if "train_loss" in each]
        if trained:
            losses, counts = ([each[key] for each in trained] for key in ("train_loss", "images"))
            line["train_loss"] = round(float(np.average(losses, weights=counts)), 6)
        return Buffered(state.model, kept), line | {"learning_rate": rate} | self._events(number)

    def _staleness_weight(self, age: int) -> float:
        """s of an update that is ``age`` server steps old."""
        return 1.0 if self.context.options.staleness_weight == "constant" else float((1 + age) ** -0.5)

    def _events(self, number: int) -> dict[str, Any]:
        """What ``metrics.jsonl`` says about the time since the last step."""
        step = self.steps[number]
        ages = [number - job.version for job in step.jobs]
        sent = len(step.jobs) + step.stale
        return {
            "selected": sent + step.lost,
            "reported": len(step.jobs),
            "lost": step.lost,
            "late": step.stale,
            "staleness": round(sum(ages) / len(ages), 4),
            "staleness_max": max(ages),
            "bytes_down": (sent + step.lost) * self.sent.down,
            "bytes_up": sent * self.sent.up,
            "virtual_seconds": round(step.end, 4),
        }

    def model(self, state: Buffered) -> PyTorchModel:
        """The newest version of the model."""
        return state.model

    def tensors(self, state: Buffered) -> dict[str, Tensor]:
        """The tensors of the model, server's optimiser and versions; between rounds the buffer is empty."""
        kept = {
            f"{VERSIONS}{version}/{name}": tensor
            for version, weights in state.versions.items()
            for name, tensor in weights.items()
        }
        return checkpoint.model_tensors(state.model) | kept

    def load(self, state: Buffered, tensors: Mapping[str, Tensor]) -> Buffered:
        """Restore the model, the server's optimiser and the versions."""
        checkpoint.restore_model(state.model, tensors)
        variables, versions = state.model.variable_map, dict[int, Weights]()
        for key, tensor in checkpoint.part(tensors, VERSIONS).items():
            version, _, name = key.partition("/")
            versions.setdefault(int(version), {})[name] = tensor.to(variables[name].device)
        return Buffered(state.model, versions)
