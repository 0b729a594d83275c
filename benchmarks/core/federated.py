"""Federated training through pfl."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, get_overall_value
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.digests import digest
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree
from benchmarks.core.ledger import calibrated, open_ledger
from benchmarks.core.privacy_statement import USERS, ProtectedUnit
from benchmarks.core.recorder import Recorder
from benchmarks.core.secret import Secret
from pfl_ext.algorithms.algorithm import Setup, refuse
from pfl_ext.algorithms.fedir import importance_weights
from pfl_ext.algorithms.optimizers import PerVariableClippedSGD, make_server_optimizer, server_learning_rate
from pfl_ext.backend import TRAIN_LOSS, CentrallyEvaluatedBackend
from pfl_ext.data.federated_dataset import (
    FederatedImageDataset,
    ImageStore,
    LocalSampling,
    Member,
    Partition,
    Sampler,
)
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.evaluation import CentralEvaluation
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.privacy.central import METRICS, metric_name
from pfl_ext.tasks.objectives import ObjectiveName
from pfl_ext.workers.distributed import current, is_main, worker_seconds


def local_sampling(config: TrainingConfig) -> LocalSampling:
    """How a user's images become batches."""
    local, augment = config.local, config.augment
    return LocalSampling(
        num_epochs=local.num_epochs,
        batch_size=local.batch_size,
        max_images=local.max_images,
        cap=local.cap,
        straddle=local.straddle,
        reshuffle=local.reshuffle,
        crop=augment.crop,
        flip=augment.flip,
        input_size=config.model.input_size,
        virtual_size=local.virtual_size,
    )


def sampler(config: TrainingConfig) -> Sampler:
    """How cohorts are drawn."""
    federated = config.federated
    if config.privacy is not None:
        return config.privacy.sampler
    if federated.sampling == "proportional":
        return "proportional_replacement" if federated.replacement else "proportional"
    return "replacement" if federated.replacement else "fixed"


def training_data(
    run: AnyRun,
    store: ImageStore,
    objective: ObjectiveName = "multi_label",
    partition: Partition | None = None,
    secret: Secret | None = None,
) -> FederatedImageDataset:
    """The training users: those of a partition, or the store's.

    ``secret``: of a private run, whose noise comes from it, and with central privacy the cohorts too.
    """
    config, runtime = run.config, run.runtime
    return FederatedImageDataset(
        store,
        local_sampling(config),
        seed=config.seed,
        cohort_seed=secret.cohort_seed if secret is not None and config.privacy is not None else None,
        noise_seed=None if secret is None else secret.noise_seed,
        partition=partition,
        sampler=sampler(config),
        reweight=importance_weights(config.federated, store, objective),
        prefetch=runtime.prefetch,
        threads=runtime.reader_threads,
    )


def pfl_model(run: AnyRun, module: ImageClassifier) -> PyTorchModel:
    """The network with its local and its server optimiser and the server's schedule."""
    config, server = run.config, run.config.server
    clip = config.local.max_grad_norm if config.local.clip_by == "variable" else None

    def local_optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        kind = torch.optim.SGD if clip is None else partial(PerVariableClippedSGD, max_norm=clip)
        local = config.local
        return kind(parameters, lr=lr, momentum=local.momentum, weight_decay=local.weight_decay)

    optimizer = make_server_optimizer(
        [p for p in module.parameters() if p.requires_grad],
        name=server.optimizer,
        learning_rate=server.learning_rate,
        beta1=server.beta1,
        beta2=server.beta2,
        epsilon=server.epsilon,
        adam_form=server.adam_form,
        momentum=server.momentum,
    )
    precision = torch.bfloat16 if run.runtime.precision == "bf16" else None
    return PyTorchModel(module, local_optimizer, optimizer, amp_dtype=precision)


def setup(
    config: TrainingConfig,
    module: ImageClassifier,
    users: FederatedImageDataset,
    directory: Path | None = None,
) -> Setup:
    """What the run's algorithm is built for; ``directory``: of the run."""
    federated = config.federated
    return Setup(
        options=federated.algorithm_options,
        num_rounds=federated.num_rounds,
        cohort_size=federated.cohort_size,
        by_images=federated.weighting == "images",
        module=module,
        users=users,
        folder=None if directory is None else directory / "checkpoint",
    )


def algorithm_and_params(config: TrainingConfig, built_for: Setup) -> tuple[Any, NNAlgorithmParams]:
    """pfl's side of the run's algorithm."""
    built: tuple[Any, NNAlgorithmParams] = config.federated.algorithm_class.build(
        built_for,
        central_num_iterations=built_for.num_rounds,
        evaluation_frequency=config.evaluation.every_rounds,
        train_cohort_size=built_for.cohort_size,
        val_cohort_size=1,  # any: the backend scores the central split instead of a cohort
    )
    return built


def cohort_engine(run: AnyRun, module: ImageClassifier, accumulate: torch.dtype) -> CohortEngine | None:
    """What trains the cohorts; None: pfl's own loop."""
    if run.runtime.engine == "stock":
        return None
    return CohortEngine(
        module,
        lanes=run.runtime.lanes,
        accumulate=accumulate,
        prefetch=run.runtime.prefetch,
        reader_threads=run.runtime.reader_threads,
        fuse=run.runtime.fuse,
        cpu_kernels=run.runtime.cpu_kernels,
    )


class RoundCallback(TrainingProcessCallback):
    """Sets the server's learning rate of the coming round and hands each round's figures to the recorder."""

    def __init__(self, config: TrainingConfig, users: FederatedImageDataset, recorder: Recorder) -> None:
        self._config, self._users, self._recorder = config, users, recorder

    def set_learning_rate(self, model: PyTorchModel, round_number: int) -> None:
        """Before round ``round_number``."""
        server = self._config.server
        rate = server_learning_rate(
            round_number,
            schedule=server.schedule,
            learning_rate=server.learning_rate,
            final_learning_rate=server.final_learning_rate,
            warmup_rounds=server.warmup_rounds,
            num_rounds=self._config.federated.num_rounds,
        )
        for group in model._central_optimizer.param_groups:
            group["lr"] = rate

    def _members(self) -> list[Member]:
        return self._users.members(self._config.federated.cohort_size)

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """pfl's hook, after the update of round ``central_iteration``."""
        values = {str(name): get_overall_value(value) for name, value in aggregate_metrics}
        line: Tree = {
            "users": int(values["train population | number of devices"]),
            "images": int(aggregate_metrics_weight(aggregate_metrics)),
            "learning_rate": values["learning rate"],
            "max_local_steps": max((m.num_steps for m in self._members()), default=0),
        }
        loss = values[str(TRAIN_LOSS)]
        if line["images"] and math.isfinite(loss):
            line["train_loss"] = round(loss, 6)
        if seconds := worker_seconds():
            line["worker_seconds"] = [round(s, 4) for s in seconds]
        if self._recorder.ledger is not None:
            local = self._recorder.ledger.mechanism.local
            named = {name: str(metric_name(name, local)) for name in METRICS}
            private = {name: values[key] for name, key in named.items() if key in values}
            line["privacy"] = private
            line["users"] = int(private["users"])  # pfl counts the nobody of an empty cohort
        self._recorder.step_done(central_iteration, line, model)
        self.set_learning_rate(model, central_iteration + 1)
        return False, Metrics()


def aggregate_metrics_weight(metrics: Metrics) -> float:
    """Images of the cohort: pfl keeps them as a sum over users with the number of users as its weight."""
    (value,) = [v for name, v in metrics if str(name) == "train population | number of data points"]
    return float(value.weighted_value)


def check_federated(
    run: AnyRun, store: ImageStore, module: ImageClassifier, partition: Partition | None
) -> None:
    """Refuse what no training could be made of, before anything is written.

    Raises:
        ValueError: for a cohort larger than the population, a budget that no noise keeps, per-user state
            that does not fit.
    """
    config = run.config
    population, federated = len(store.user_ids), config.federated
    if config.privacy is not None:
        calibrated(config.privacy, population, federated.cohort_size, federated.num_rounds)
    users = training_data(run, store, module.objective.name, partition)
    users.cohort(federated.cohort_size)
    refuse(federated.algorithm_class.refusals, workers=current() is not None)
    federated.algorithm_class.check(setup(config, module, users))


def train_federated(
    run: AnyRun,
    store: ImageStore,
    val: ImageStore,
    module: ImageClassifier,
    recorder: Recorder,
    partition: Partition | None = None,
    protected: ProtectedUnit = USERS,
) -> PyTorchModel:
    """Train to the last round, from the run's checkpoint if it has one; the model after the last round.

    Args:
        run: what and how.
        store: the training images.
        val: what the model is scored on between rounds.
        module: the network before its first step.
        recorder: of the run directory.
        partition: who owns the training images; None: the store's users.
        protected: whom a private run's guarantee is about.
    """
    config = run.config
    secret = recorder.files.secret()
    users = training_data(run, store, module.objective.name, partition, secret)
    if secret is not None:
        recorder.ledger = open_ledger(config, users, protected, secret, recorder.files.path)
    model = pfl_model(run, module)
    algorithm, params = algorithm_and_params(config, setup(config, module, users, recorder.files.path))
    recorder.checkpoints.algorithm = algorithm.user_state
    evaluation = partial(recorder.score, CentralEvaluation(val, threads=run.runtime.reader_threads))
    postprocessors: list[Any] = [
        WeightByDatapoints() if config.federated.weighting == "images" else WeightByUser()
    ]
    if recorder.ledger is not None:
        postprocessors.append(recorder.ledger.mechanism)
    accumulate = torch.float64 if run.runtime.accumulate == "fp64" else torch.float32
    engine = cohort_engine(run, module, accumulate)
    precision = torch.bfloat16 if run.runtime.precision == "bf16" else None
    if engine is not None and is_main():
        print(f"training is computed in {engine.arithmetic(precision)}")
    backend = CentrallyEvaluatedBackend(
        users,
        evaluation,
        seed=config.seed,
        postprocessors=postprocessors,
        on_evaluation=recorder.evaluated,
        engine=engine,
        accumulate=accumulate,
        config_hash=digest(config)[:16],
    )
    start = recorder.restore(model)
    algorithm._current_central_iteration = start
    callback = RoundCallback(config, users, recorder)
    callback.set_learning_rate(model, start)
    local = NNTrainHyperParams(
        local_num_epochs=config.local.num_epochs,
        local_learning_rate=config.local_learning_rate,
        local_batch_size=config.local.batch_size,
        local_max_grad_norm=config.local.max_grad_norm if config.local.clip_by == "global" else None,
    )
    algorithm.run(
        params,
        backend,
        model,
        local,
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[callback],
        send_metrics_to_platform=False,
    )
    kind = "float32" if precision is None else "bfloat16"
    recorder.arithmetic = (
        f"{kind}, pfl's own loop" if backend.engine is None else backend.engine.arithmetic(precision)
    )
    if engine is not None:
        engine.close()
    if not recorder.ended:
        recorder.evaluated(config.federated.num_rounds, evaluation(model), model)
        recorder.end(model)
    return model
