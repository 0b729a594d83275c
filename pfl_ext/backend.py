"""A pfl backend that trains a cohort round by round and evaluates on a split held centrally."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor

from pfl_ext.aggregator import FlatSumAggregator
from pfl_ext.distributed import begin_work
from pfl_ext.evaluation import CentralEvaluation
from pfl_ext.federated_dataset import FederatedImageDataset
from pfl_ext.randomness import seed32

OnEvaluation = Callable[[int, Metrics, PyTorchModel], None]


class CentrallyEvaluatedBackend(SimulatedBackend):
    """pfl's ``SimulatedBackend`` with three things changed, its training of users left as it is.

    * The cohort and every seed of a round are functions of (seed, round), not of how often a random
      state was drawn from, so that a resumed run repeats nothing.
    * Users are not scored before and after their local training in evaluation rounds (pfl scores all
      of them, each on its own training images).
    * The validation population of pfl's ``FederatedNNAlgorithm`` is not a cohort of users but one
      split held centrally: every ``evaluation_frequency`` rounds the model *at the start of the round*
      is scored on it, and ``on_evaluation(round, metrics, model)`` is called while the model is still
      in that state, so that what is kept as best is what was scored.

    :param accumulate: precision of the sum over users.
    :param config_hash: compared between workers, with the round and its cohort, before each reduction.
    """

    def __init__(
        self,
        training_data: FederatedImageDataset,
        evaluation: CentralEvaluation,
        *,
        seed: int,
        postprocessors: Sequence[Postprocessor] = (),
        on_evaluation: OnEvaluation = lambda round_number, metrics, model: None,
        accumulate: torch.dtype = torch.float32,
        config_hash: str = "",
    ) -> None:
        super().__init__(training_data, training_data, list(postprocessors), FlatSumAggregator(accumulate))
        self._images, self._evaluation = training_data, evaluation
        self._seed, self._on_evaluation, self._config_hash = seed, on_evaluation, config_hash

    async def async_gather_results(
        self, model: PyTorchModel, training_algorithm: Any, *, central_context: CentralContext
    ) -> tuple[Any, Metrics]:
        """Train the round's cohort, or score the central split when the context is for validation."""
        round_number = central_context.current_central_iteration
        if central_context.population != Population.TRAIN:
            begin_work(evaluation=round_number, config=self._config_hash)
            metrics = self._evaluation(model)
            self._on_evaluation(round_number, metrics, model)
            return None, Metrics()
        self._images.set_round(round_number)
        cohort = self._images.cohort(central_context.cohort_size)
        begin_work(round=round_number, cohort=f"{zlib.crc32(cohort.tobytes()):08x}", config=self._config_hash)
        context = replace(
            central_context, do_evaluation=False, seed=seed32(self._seed, "central noise", round_number)
        )
        gathered: tuple[Any, Metrics] = await super().async_gather_results(
            model, training_algorithm, central_context=context
        )
        return gathered
