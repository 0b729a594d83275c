"""Local training for algorithms with a loop of their own: users who train whatever weights they are given.

Users train as FedAvg's do, by the engine where it can, and with several workers each takes its share of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from pfl_ext.algorithms.algorithm import Means
from pfl_ext.algorithms.fedavg import FedAvg
from pfl_ext.backend import TRAIN_LOSS, cohort_line, training_context
from pfl_ext.data.federated_dataset import IntArray
from pfl_ext.privacy.central import is_private
from pfl_ext.rules import PRIVACY_NOT_ARGUED, refuse
from pfl_ext.workers.distributed import apart, begin_work, current

Weights = dict[str, Tensor]
"""The trained variables of a model by name."""


class Clients:
    """The users of a run.

    Raises:
        ValueError: in a private run, whose mechanism bounds one sum of updates in each round and not several.
    """

    def __init__(self, means: Means) -> None:
        refuse(PRIVACY_NOT_ARGUED, privacy=any(map(is_private, means.postprocessors)))
        self._means, self._algorithm = means, FedAvg()
        self._backend = means.backend()

    def weights(self) -> Weights:
        """A copy of those that the run's model has now."""
        return {name: p.detach().clone() for name, p in self._means.model.variable_map.items()}

    @torch.no_grad()
    def model(self, weights: Mapping[str, Tensor]) -> PyTorchModel:
        """The run's model, which has these weights from here on."""
        for name, parameter in self._means.model.variable_map.items():
            parameter.copy_(weights[name])
        return self._means.model

    def cohort(self, number: int) -> IntArray:
        """The users of a round; the same on every worker."""
        return self._means.users.cohort(self._means.cohort_size, number)

    def mean_update(
        self, weights: Mapping[str, Tensor], users: IntArray, number: int
    ) -> tuple[Weights, dict[str, Any]]:
        """Train some users from these weights, in a round.

        Returns:
            The weighted mean of their updates, on every worker, and what ``metrics.jsonl`` says of them:
            how many users and images, and their training loss. Without users the mean is 0.
        """
        if not len(users):
            self.model(weights)
            return {name: torch.zeros_like(w) for name, w in weights.items()}, {"users": 0, "images": 0}
        update, metrics = self._trained(weights, users, number)
        # pfl would also count the nobody that stands for the users of a worker without any
        return update, {**cohort_line(metrics), "users": len(users)}

    def each_update(
        self, weights: Sequence[Mapping[str, Tensor]], users: IntArray, number: int
    ) -> tuple[list[Weights], dict[str, Any]]:
        """Train each user alone, from weights of its own, in a round.

        It is what `mean_update` gives for one user after another. With several workers each trains a part of
        the users, as even as their predicted work allows, and one reduction gives all updates to all workers.
        A user's batches are a function of (seed, ``number``, user), and so the same at each of its places if
        it has several. The run's model has any of the weights afterwards.

        Args:
            weights: from which the user at the same place of ``users`` starts.
            users: ``[n]``, as `cohort` gives them.
            number: of the round.

        Returns:
            The n users' own updates, not weighted, on every worker; and what ``metrics.jsonl`` says of them
            together, as `mean_update` does. A user without images has an update of zeros.
        """
        assert len(weights) == len(users)
        if not len(users):
            return [], {"users": 0, "images": 0}
        workers, hashed = current(), self._means.config_hash
        begin_work(round=number, cohort=f"{zlib.crc32(users.tobytes()):08x}", config=hashed)
        dealt = self._means.users.assign(users, 1 if workers is None else workers.world_size)
        updates = [{name: torch.zeros_like(w) for name, w in start.items()} for start in weights]
        device = next(iter(weights[0].values())).device
        seen = torch.zeros(
            len(users), 3, device=device
        )  # images; the sum of their losses; of how many that is
        with apart():
            for place in dealt[0 if workers is None else workers.global_rank]:
                updates[place], metrics = self._trained(weights[place], users[place : place + 1], number)
                seen[place] = torch.tensor(_counts(metrics))
        if workers is not None:
            workers.sum_model([seen], [update[name] for update in updates for name in update])
        images, total, counted = seen.double().sum(0).tolist()
        line = {"users": len(users), "images": int(images)}
        loss = total / counted if counted else math.nan
        return updates, {**line, "train_loss": round(loss, 6)} if math.isfinite(loss) else line

    def _trained(
        self, weights: Mapping[str, Tensor], users: IntArray, number: int
    ) -> tuple[Weights, Metrics]:
        """The weighted mean of the updates of some users, at least one."""
        model = self.model(weights)
        context = training_context(number, len(users), self._means.local_in(number))
        with self._means.users.only(users):
            sums, metrics = self._backend.gather_results(model, self._algorithm, central_context=context)
        if float(sums.weight):  # 0 where users weigh by their images and have none: then the sums are 0 too
            sums.average()
        return {name: sums[name].to(w.dtype, copy=True) for name, w in weights.items()}, metrics


def _counts(metrics: Metrics) -> tuple[float, float, float]:
    """Of a user that trained alone: its images, the sum of its images' losses, and of how many that is."""
    values = {str(name): value for name, value in metrics}
    loss = values[str(TRAIN_LOSS)]
    images: float = values["train population | number of data points"].weighted_value
    return images, loss.weighted_value, loss.weight
