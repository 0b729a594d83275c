"""A pfl backend that trains one cohort in each round, and evaluates on a split that the server holds."""

from __future__ import annotations

import math
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import (
    SimulatedBackend,
    get_num_datapoints_weight_name,
    get_num_devices_weight_name,
    get_num_params_weight_name,
    get_total_weight_name,
)
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal import ops
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.metrics import Metrics, StringMetricName, Weighted, get_overall_value
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor
from pfl.stats import MappedVectorStatistics

from dataset.arrays import IntArray
from pfl_ext.aggregation.norm_bound import BoundedUpdates
from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.plan import dealt
from pfl_ext.engine.selfcheck import SelfCheck
from pfl_ext.engine.training import LocalTraining, local_training
from pfl_ext.engine.tuning import Round, Tuner
from pfl_ext.engine_trial import Trial, few_of, steady, with_corrections
from pfl_ext.privacy.central import TALLY, NoisyMean, PrivateMean, ScalesUpdates, is_private
from pfl_ext.randomness import seed32
from pfl_ext.rules import Rule, StepCounter, refusals_of, refuse, rule_of
from pfl_ext.summing import FlatSumAggregator
from pfl_ext.workers.distributed import begin_work

TRAIN_LOSS = StringMetricName("training loss")
"""Metric: the mean local training loss over a round's images, each at the step with that image."""
OnEvaluation = Callable[[int, Metrics, PyTorchModel], None]


def training_context(
    round_number: int, cohort_size: int, local: NNTrainHyperParams | None = None
) -> CentralContext[Any, Any]:
    """The context that pfl's algorithms pass to a backend for a round; the backend draws the seed itself."""
    return CentralContext(
        current_central_iteration=round_number,
        do_evaluation=False,
        cohort_size=cohort_size,
        population=Population.TRAIN,
        model_train_params=local,
        model_eval_params=None,
        algorithm_params=None,
        seed=0,
    )


def cohort_line(metrics: Metrics) -> dict[str, Any]:
    """A cohort's entries in a line of ``metrics.jsonl``: numbers of users and images, and their loss."""
    values = {str(name): value for name, value in metrics}
    images = int(values["train population | number of data points"].weighted_value)  # the sum over users
    line = {"users": int(get_overall_value(values["train population | number of devices"])), "images": images}
    loss = get_overall_value(values[str(TRAIN_LOSS)])
    return {**line, "train_loss": round(loss, 6)} if images and math.isfinite(loss) else line


class _OneByOne:
    """Trains users one by one with the engine, for postprocessors that must see each user's update."""

    def __init__(self, engine: CohortEngine, local: LocalTraining, rule: Rule) -> None:
        self._engine, self._local_training, self._rule = engine, local, rule

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: Any, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Train one user, as pfl's algorithms do."""
        counted = StepCounter(user_dataset)
        update = MappedVectorStatistics(self._engine.train_alone(counted, self._local_training))
        return self._rule.statistics(update, counted.num_steps), Metrics()


class AddsUsers(ABC):
    """The interface of an algorithm that adds up what many users send faster than one by one.

    The backend uses it where a user's statistics are only scaled by their norm.
    """

    @abstractmethod
    def sum_of(
        self, users: FederatedImageDataset, members: Sequence[Member], scaling: PrivateMean | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The sum over these members, each scaled, and their tallies ``[5]`` (`pfl_ext.privacy.central`)."""


class CentrallyEvaluatedBackend(SimulatedBackend):
    """pfl's ``SimulatedBackend`` with four changes, and optionally with the engine's training of users.

    * The cohort and every seed of a round are functions of (seed, round). They do not depend on earlier
      draws, so a resumed run repeats nothing.
    * Users are not scored before and after their local training in evaluation rounds (pfl scores each user
      on its own training images).
    * The validation population of pfl's ``FederatedNNAlgorithm`` is not a cohort of users but one split that
      the server holds. Every ``evaluation_frequency`` rounds ``evaluation`` scores the model *at the start of
      the round*, and ``on_evaluation(round, metrics, model)`` is called before the model changes. So the
      model kept as best is the one that was scored. (Runs of `pfl_ext.algorithms` score between rounds.)
    * pfl's own privacy mechanisms are refused where their noise would come from the public seed. Any
      mechanism is refused where its bound on one user would not hold: before another postprocessor, for a
      cohort with a user twice, and for an algorithm whose ``refusals`` refuse privacy.

    An algorithm that adds up many users by itself (`AddsUsers`) is asked for their sum, not for each user.

    ``engine`` trains the cohort instead of pfl's loop, with the same result up to rounding. With None, or,
    after a line on the screen, where the engine does not know the algorithm, pfl's loop trains.

    Args:
        evaluation: scores a model on the central split; needed where pfl's algorithm has a validation cohort.
        accumulate: data type of the sum over users.
        config_hash: is compared between workers, with the round and its cohort, before each reduction.
        check: compares the engine with pfl's loop for the first cohort on a GPU; None: no comparison.
        tuner: arranges the engine by timing users of the first cohort; None: the arrangement stays.
    """

    def __init__(
        self,
        training_data: FederatedImageDataset,
        *,
        seed: int,
        postprocessors: Sequence[Postprocessor] = (),
        evaluation: Callable[[PyTorchModel], Metrics] | None = None,
        on_evaluation: OnEvaluation = lambda round_number, metrics, model: None,
        engine: CohortEngine | None = None,
        accumulate: torch.dtype = torch.float32,
        config_hash: str = "",
        check: SelfCheck | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        private = [p for p in postprocessors if is_private(p)]
        if training_data.noise_seed is None and not all(isinstance(p, NoisyMean) for p in private):
            raise ValueError(
                "pfl's own privacy mechanism would draw its noise from the public seed, so that anybody "
                "could subtract it: give FederatedImageDataset a secret noise_seed (secrets.randbits(128))"
            )
        if tuner is not None and private:
            raise ValueError("a private run is not tuned: how long users take would show in its results")
        if any(map(is_private, postprocessors[:-1])):
            raise ValueError(
                "what follows a privacy mechanism could make an update longer than its bound: place the "
                "mechanism last among the postprocessors"
            )
        super().__init__(training_data, training_data, list(postprocessors), FlatSumAggregator(accumulate))
        self._images, self.engine, self._check = training_data, engine, check
        self._tuner = tuner
        self._evaluation, self._on_evaluation = evaluation, on_evaluation
        self._seed, self._config_hash = seed, config_hash

    @property
    def _is_private(self) -> bool:
        return any(map(is_private, self._postprocessors))

    def gather_results(
        self, model: PyTorchModel, training_algorithm: Any, *, central_context: CentralContext
    ) -> tuple[Any, Metrics]:
        """pfl's method without an event loop, as the simulation never waits; in Jupyter one runs already."""
        work = self.async_gather_results(model, training_algorithm, central_context=central_context)
        try:
            work.send(None)
        except StopIteration as done:
            result: tuple[Any, Metrics] = done.value
            return result
        raise AssertionError("pfl's simulation does not wait")

    async def async_gather_results(
        self, model: PyTorchModel, training_algorithm: Any, *, central_context: CentralContext
    ) -> tuple[Any, Metrics]:
        """Train the round's cohort, or score the central split when the context is for validation."""
        round_number = central_context.current_central_iteration
        if central_context.population != Population.TRAIN:
            if self._evaluation is None:
                raise ValueError(
                    "a validation cohort, but no evaluation: give the backend one (pfl_ext.evaluation), "
                    "or set val_cohort_size to None"
                )
            begin_work(evaluation=round_number, config=self._config_hash)
            metrics = self._evaluation(model)
            self._on_evaluation(round_number, metrics, model)
            return None, Metrics()
        self._images.set_round(round_number)
        cohort = self._images.cohort(central_context.cohort_size)
        begin_work(round=round_number, cohort=f"{zlib.crc32(cohort.tobytes()):08x}", config=self._config_hash)
        secret = self._images.noise_seed
        seed = seed32(self._seed if secret is None else secret, "central noise", round_number)
        context = replace(central_context, do_evaluation=False, seed=seed)
        algorithm = training_algorithm
        self._refuse(algorithm, cohort)
        if isinstance(algorithm, AddsUsers) and self._only_norms_matter():
            return self._finish(context, *self._add_cohort(algorithm, context))
        rule = rule_of(algorithm, model, context)
        local = self._local_training(algorithm, rule, model, context)
        if local is not None and rule is not None and self._holds(local, rule, model, algorithm, context):
            assert self.engine is not None
            if self._only_norms_matter() and (rule.sends_update_alone or self._weighting()[1] is None):
                return self._finish(context, *self._train_cohort(self.engine, local, context, rule))
            if rule.correction is None:
                algorithm = _OneByOne(self.engine, local, rule)
        noted = model.pytorch_model.noted = list[tuple[torch.Tensor, int]]()
        stats, metrics = await super().async_gather_results(model, algorithm, central_context=context)
        if any(isinstance(p, WeightByUser) for p in self._postprocessors) and not self._is_private:
            stats.weight = max(stats.weight - self._images.idle_workers(context.cohort_size), 1.0)
        model.pytorch_model.noted = None
        if isinstance(algorithm, _OneByOne):
            assert self.engine is not None
            total, number = self.engine.take_losses()
        else:
            total, number = sum(float(loss) * size for loss, size in noted), sum(size for _, size in noted)
        losses = Metrics([(TRAIN_LOSS, Weighted(total, number))])
        if get_ops().distributed.world_size > 1:
            losses = ops.all_reduce_metrics(losses)
        return stats, metrics | losses

    def _refuse(self, algorithm: Any, cohort: IntArray) -> None:
        """Refuse combinations that the algorithm refuses, and a private cohort with a user twice."""
        twice = len(np.unique(cohort)) != len(cohort)
        if twice and self._is_private:
            raise ValueError(
                "a user who comes twice in a cohort moves the sum by twice the clipping bound: draw private "
                "cohorts without replacement"
            )
        refuse(
            refusals_of(algorithm),
            workers=get_ops().distributed.world_size > 1,
            privacy=self._is_private,
            postprocessors=len(self._postprocessors) != 1 or not self._only_norms_matter(),
            replacement=twice,
        )

    def _local_training(
        self, algorithm: Any, rule: Rule | None, model: PyTorchModel, context: CentralContext
    ) -> LocalTraining | None:
        if self.engine is None:
            return None
        own_steps = "the algorithm's own local steps"
        local = own_steps if rule is None else local_training(rule, model, context)
        if isinstance(local, LocalTraining):
            return local
        print(f"engine: pfl's own loop trains the users, because of {local}", file=sys.stderr)
        self.engine = None
        return None

    def _holds(
        self, local: LocalTraining, rule: Rule, model: PyTorchModel, algorithm: Any, context: CentralContext
    ) -> bool:
        """Whether the engine may train; on a GPU or with `CheckOnCpu`, after a comparison with pfl's loop."""
        check, engine = self._check, self.engine
        assert engine is not None
        few = few_of(self._images.members(context.cohort_size)) if check is not None else []
        if check is None or not (engine.on_gpu or check.on_cpu) or not few:
            return True
        self._check = None
        together = self._only_norms_matter()
        with steady(model, local) as trained:
            if rule.correction is not None:
                user, rate = self._images.read(few[0]), trained.learning_rate
                algorithm, rule = with_corrections(algorithm, rule, model, context, user, rate)
            trial = Trial(
                engine=engine,
                images=self._images,
                members=few,
                local=trained,
                rule=rule,
                model=model,
                algorithm=algorithm,
                context=context,
                postprocessors=self._postprocessors if together else (),
                weighting=self._weighting() if together else None,
            )
            self.engine = engine if trial.settled(check) else None
        return self.engine is not None

    def _only_norms_matter(self) -> bool:
        """Whether a user's update is only weighted, and scaled by its norms at most once."""
        weightings = [p for p in self._postprocessors if type(p) in (WeightByDatapoints, WeightByUser)]
        if len(weightings) != 1:
            return False
        first, last = self._postprocessors[0], self._postprocessors[-1]
        is_scaled = isinstance(first, BoundedUpdates) ^ isinstance(last, PrivateMean)
        return len(self._postprocessors) == 1 + is_scaled

    def _train_cohort(
        self, engine: CohortEngine, local: LocalTraining, context: CentralContext, rule: Rule
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """The worker's sum of weighted, clipped updates, and its metrics under pfl's names."""
        by_images, scaling = self._weighting()
        workers, cohort = get_ops().distributed, self._images.members(context.cohort_size)
        weight = partial(Member.weight, by_images=by_images)
        if self._tuner is not None and rule.correction is None:  # timing would change it
            self._tuner.tune(engine, Round(self._images, cohort, local, weight, scaling, rule))
            self._tuner = None
        tasks = engine.tasks(cohort, local, scaling)
        mine = dealt(tasks, workers.world_size)[workers.global_rank]
        done = engine.train(self._images, mine, local, weight, scaling, rule)
        members = [member for task in mine for member in task.members]
        stats = MappedVectorStatistics(dict(done.update), weight=sum(map(weight, members)))
        for name in rule.counts(0):
            count = sum(weight(m) * rule.counts(m.num_steps)[name] for m in members)
            stats[name] = torch.tensor([float(count)], device=next(iter(done.update.values())).device)
        for name, sent in done.besides.items():
            stats[name] = sent
        if self._is_private:
            nothing = torch.zeros(5, device=next(iter(done.update.values())).device)
            stats[TALLY] = nothing if done.tally is None else done.tally
        metrics = _cohort_metrics(context.population, done.num_users, done.num_images)
        if isinstance(scaling, BoundedUpdates):
            metrics |= scaling.metrics(done.tally)
        metrics[TRAIN_LOSS] = Weighted(*engine.take_losses())
        return stats, metrics

    def _add_cohort(
        self, algorithm: AddsUsers, context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """The worker's sum of what users send (clipped if the run is private), and its metrics."""
        by_images, scaling = self._weighting()
        assert not by_images, "every user has the weight 1"
        private = scaling if isinstance(scaling, PrivateMean) else None
        members = self._images.share(context.cohort_size)
        total, tally = algorithm.sum_of(self._images, members, private)
        stats = MappedVectorStatistics(total, weight=float(len(members)))
        if private is not None:
            stats[TALLY] = tally
        images = sum(member.num_images for member in members)
        metrics = _cohort_metrics(context.population, len(members), images)
        metrics[TRAIN_LOSS] = Weighted(0, 0)
        return stats, metrics

    def _weighting(self) -> tuple[bool, ScalesUpdates | None]:
        """Whether users are weighted by images, and what scales updates; only if `_only_norms_matter`."""
        by_images = any(isinstance(p, WeightByDatapoints) for p in self._postprocessors)
        scales = [p for p in self._postprocessors if isinstance(p, (BoundedUpdates, PrivateMean))]
        if by_images and self._is_private:
            raise ValueError("private training weights every user by 1: set federated.weighting to users")
        return by_images, scales[0] if scales else None

    def _finish(
        self, context: CentralContext, stats: MappedVectorStatistics, metrics: Metrics
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """As pfl does after training: reduce over workers, then postprocess on the server."""
        if get_ops().distributed.world_size > 1:
            stats, metrics = self._aggregator.worker_reduce(
                aggregated_worker_stats=stats, central_context=context, aggregated_worker_metrics=metrics
            )
        for postprocessor in self._postprocessors[::-1]:
            metrics |= postprocessor.postprocess_server_metrics(
                central_context=context, aggregate_metrics=metrics
            )
        for postprocessor in self._postprocessors[::-1]:
            stats, more = postprocessor.postprocess_server(
                stats=stats, central_context=context, aggregate_metrics=metrics
            )
            metrics |= more
        metrics[get_num_params_weight_name()] = stats.num_parameters
        return stats, metrics


def _cohort_metrics(population: Population, users: int, images: int) -> Metrics:
    """The metrics of a cohort, under pfl's names."""
    metrics = Metrics()
    metrics[get_num_devices_weight_name(population)] = users
    metrics[get_num_datapoints_weight_name(population)] = Weighted(images, users)
    metrics[get_total_weight_name(population)] = Weighted(users, users)
    return metrics
