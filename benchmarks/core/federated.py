"""Federated training through pfl."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor
from torch import nn

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.digests import digest
from benchmarks.core.config.sections import Runtime, TrainingConfig
from benchmarks.core.config.updates import check_kept, error_bytes
from benchmarks.core.experiment import Experiment
from benchmarks.core.ledger import calibrated, open_ledger
from benchmarks.core.losses import check_losses
from benchmarks.core.precision import name_of, precision_of
from benchmarks.core.privacy_statement import USERS, ProtectedUnit
from benchmarks.core.recorder import Recorder
from benchmarks.core.repeatable import check_repeatable
from benchmarks.core.secret import Secret
from benchmarks.core.single_users import own_split
from pfl_ext.algorithms.algorithm import RunContext, Setup
from pfl_ext.algorithms.fedir import importance_weights
from pfl_ext.algorithms.own_images import OwnSplit
from pfl_ext.algorithms.personal_parts import BACKBONE
from pfl_ext.attacks.attack import HONEST, Attack, attackers
from pfl_ext.averaging import ModelAverage
from pfl_ext.compression.compressor import PLAIN, Compressor
from pfl_ext.data.federated_dataset import (
    FederatedImageDataset,
    ImageStore,
    Partition,
    Sampler,
    natural_partition,
)
from pfl_ext.devices.turnout import Turnouts
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.cpu.kernels import CpuKernels
from pfl_ext.engine.cpu.layers import kernels_for
from pfl_ext.engine.selfcheck import SelfCheck
from pfl_ext.engine.tuning import Tuner
from pfl_ext.evaluation import CentralEvaluation
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.trained import new_part
from pfl_ext.rules import refuse
from pfl_ext.tasks.task import Task
from pfl_ext.workers.distributed import begin_work, current, is_main, worker_seconds

OTHER_RATES = ("head_rate_factor", "layer_decay")
"""Keys of ``local`` that give layers different learning rates, unless they are 1."""


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
    task: Task,
    partition: Partition | None = None,
    secret: Secret | None = None,
) -> FederatedImageDataset:
    """The training users: those of a partition, or the store's.

    ``secret``: of a private run, whose noise comes from it, and with central privacy the cohorts too.
    """
    config, runtime = run.config, run.runtime
    if (found := attack(config)) is not None:
        owners = natural_partition(store) if partition is None else partition
        bad = attackers(config.seed, len(owners.user_ids), config.attack.share)
        owned = np.zeros(int(store.user_offsets[-1]), bool)
        owned[owners.rows[np.repeat(bad, owners.sizes)]] = True
        store = found.images(store, owned)
    return FederatedImageDataset(
        store,
        config.sampling,
        seed=config.seed,
        cohort_seed=secret.cohort_seed if secret is not None and config.privacy is not None else None,
        noise_seed=None if secret is None else secret.noise_seed,
        partition=partition,
        sampler=sampler(config),
        reweight=importance_weights(config.federated, store, task),
        collate=task.collate,
        prefetch=runtime.prefetch,
        threads=runtime.reader_threads,
    )


def pfl_model(run: AnyRun, module: ImageClassifier) -> PyTorchModel:
    """The network with its local and its server optimiser and the server's schedule."""
    config = run.config
    groups = module.rate_groups(config.server.learning_rate, config.server.head_rate_factor)
    optimizer = config.server.build(groups, config.server.chosen_options)

    def of_user(_: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        local = config.local
        return local.new_optimizer(module.rate_groups(lr, local.head_rate_factor, local.layer_decay), lr)

    return PyTorchModel(module, of_user, optimizer, amp_dtype=precision_of(run, module))


def attack(config: TrainingConfig) -> Attack | None:
    """What attackers do; None: there are none."""
    section = config.attack
    chosen: Attack = section.chosen(section.chosen_options)
    return None if section.kind == HONEST else chosen


def compressor(config: TrainingConfig) -> Compressor | None:
    """What compresses updates; None: nothing does."""
    section = config.compression
    chosen: Compressor = section.chosen(section.chosen_options)
    return None if section.kind == PLAIN else chosen


def setup(
    config: TrainingConfig,
    module: ImageClassifier,
    users: FederatedImageDataset,
    directory: Path | None = None,
    own: OwnSplit | None = None,
) -> Setup:
    """The run that its algorithm is chosen for; ``directory``: where it lies; ``own``: see `own_split`."""
    federated = config.federated
    return Setup(
        options=federated.chosen_options,
        num_rounds=federated.num_rounds,
        cohort_size=federated.cohort_size,
        by_images=federated.weighting == "images",
        private=config.is_private,
        module=module,
        users=users,
        seed=config.seed,
        rate_keys=tuple(f"local.{key}" for key in OTHER_RATES if getattr(config.local, key) != 1),
        clips_all=config.local.global_max_grad_norm is not None,
        is_sgd=config.local.optimizer == "sgd",
        momentum=config.local.momentum,
        pretrained=config.model.pretrained,
        keeps_errors=bool(getattr(config.compression.chosen_options, "error_feedback", False)),
        devices=config.devices,
        folder=None if directory is None else directory / "checkpoint",
        own=own,
    )


def has_engine(run: AnyRun) -> bool:
    """Whether the engine trains a run's users, where it can."""
    unread = run.config.federated.chosen.idle_in_runtime.split()
    return run.runtime.engine == "fast" and "engine" not in unread and "lanes" not in unread


def run_context(
    run: AnyRun,
    chosen: Setup,
    score: Callable[[PyTorchModel], Metrics],
    mechanism: Postprocessor | None = None,
) -> RunContext:
    """What the run's algorithm trains with; ``mechanism``: of a private run."""
    config, local, runtime = run.config, run.config.local, run.runtime
    accumulate = torch.float64 if runtime.accumulate == "fp64" else torch.float32
    weighting = WeightByDatapoints() if chosen.by_images else WeightByUser()
    model = pfl_model(run, chosen.module)  # moves the module to its device, which the engine takes over
    engine, kernels = _engine(run, chosen.module, accumulate)
    return RunContext(
        **vars(chosen),
        model=model,
        local=NNTrainHyperParams(
            local_num_epochs=local.num_epochs,
            local_learning_rate=config.local_learning_rate,
            local_batch_size=local.batch_size,
            local_max_grad_norm=local.global_max_grad_norm,
        ),
        score=score,
        local_rate=config.local_rate,
        server_rate=partial(config.server.rate, num_rounds=config.federated.num_rounds),
        postprocessors=[weighting] if mechanism is None else [weighting, mechanism],
        engine=engine,
        kernels=kernels,
        accumulate=accumulate,
        config_hash=digest(config)[:16],
        check=SelfCheck(chosen.folder and chosen.folder.parent, chosen.private)
        if runtime.check_engine
        else None,
        tuner=tuner(run.runtime, engine, chosen.private or mechanism is not None, chosen.folder),
        compressor=compressor(config),
        rule=config.aggregation.chosen(config.aggregation.chosen_options),
        attack=attack(config),
        attack_share=config.attack.share,
    )


def _engine(
    run: AnyRun, module: ImageClassifier, accumulate: torch.dtype
) -> tuple[CohortEngine | None, CpuKernels | None]:
    """What trains the users of a run besides pfl's loop; the kernels are loaded, or found missing, once."""
    runtime, unread = run.runtime, run.config.federated.chosen.idle_in_runtime.split()
    if not has_engine(run):
        compiled = runtime.engine == "fast" and runtime.cpu_kernels and "engine" not in unread
        return None, kernels_for(module) if compiled else None
    engine = CohortEngine(
        module,
        lanes=runtime.lanes,
        accumulate=accumulate,
        prefetch=runtime.prefetch,
        reader_threads=runtime.reader_threads,
        fuse=runtime.fuse,
        cpu_kernels=runtime.cpu_kernels,
        rate_varies=run.config.local.schedule != "constant",
    )
    return engine, engine.kernels


def tuner(
    runtime: Runtime, engine: CohortEngine | None, private: bool, checkpoints: Path | None
) -> Tuner | None:
    """What arranges a run's engine; None where nothing does."""
    wanted = runtime.tune
    if wanted is None:
        wanted = engine is not None and engine.on_gpu and not private and not runtime.deterministic
    settings = runtime.precision, runtime.accumulate, runtime.cpu_kernels, runtime.lanes, runtime.fuse
    return Tuner(checkpoints and checkpoints.parent, repr(settings)) if wanted and engine else None


def check_federated(experiment: Experiment[Any], module: ImageClassifier) -> int:
    """Refuse what no training could be made of, before anything is written.

    Returns:
        Bytes on disk of what the algorithm keeps besides a model, and of errors of compression.

    Raises:
        ValueError: for a task that mixes images, a cohort larger than the population, a budget that no noise
            keeps, per-user state that does not fit.
    """
    run, store, partition = experiment.run, experiment.split("train"), experiment.partition()
    config = run.config
    if config.is_private or has_engine(run):
        check_losses(module, store, config.sampling, config.is_private, has_engine(run))
    federated, users = config.federated, training_data(run, store, module.task, partition)
    if users.num_users == 1 and partition is None and is_main():
        print(
            "one user owns all training images, so only one client is trained: divide them among "
            "clients, for example with --data.partition iid-clients-10-seed-0",
            file=sys.stderr,
        )
    if config.privacy is not None:
        calibrated(config.privacy, users.num_users, federated.cohort_size, federated.num_rounds)
    draws_cohorts = "federated.cohort_size" not in federated.chosen.idle.split()
    if draws_cohorts:
        users.cohort(federated.cohort_size)
    refuse(federated.chosen.refusals, workers=current() is not None)
    chosen = setup(config, module, users, own=own_split(experiment, experiment.split))
    federated.chosen.check(chosen)
    check_kept(config, chosen)
    check_repeatable(config, module)
    _check_head_is_shared(config, module)
    if config.devices is not None:
        sent, ids = federated.chosen.traffic(module), users.partition.user_ids
        drawn = {"cohort_size": federated.cohort_size, "seed": config.seed}
        turnouts = Turnouts(config.devices, users, ids, **drawn, sent=sent)
        if draws_cohorts:
            turnouts.check_deadline()
            turnouts.of(0)
    of_users: int = federated.chosen.state_bytes(chosen) + error_bytes(config, chosen)
    return of_users


def _check_head_is_shared(config: TrainingConfig, module: ImageClassifier) -> None:
    """Refuse a rate of the server for a head that stays with the users."""
    federated, factor = config.federated, config.server.head_rate_factor
    shared_names = getattr(federated.chosen, "shared_names", None)
    if factor == 1 or shared_names is None:
        return
    head = f"{BACKBONE}{new_part(module.backbone)}."
    if not any(name.startswith(head) for name in shared_names(module, federated.chosen_options)):
        raise ValueError(
            f"server.head_rate_factor is {factor:g}, but with federated.algorithm {federated.name} the head "
            "stays with the users: set it to 1, or change federated.options.personal"
        )


def train_federated(
    run: AnyRun,
    store: ImageStore,
    val: ImageStore,
    module: ImageClassifier,
    recorder: Recorder,
    partition: Partition | None = None,
    protected: ProtectedUnit = USERS,
    own: OwnSplit | None = None,
) -> PyTorchModel:
    """Train to the last round, from the run's checkpoint if it has one; the model after the last round.

    The average of the models, if there is one, is in ``recorder.checkpoints.average``.

    Args:
        run: what is trained, and by what.
        store: the training images.
        val: what the model is scored on between rounds.
        module: the network before its first step.
        recorder: of the run directory.
        partition: who owns the training images; None: the store's users.
        protected: whom a private run's guarantee is about.
        own: see `single_users.own_split`.
    """
    config = run.config
    recorder.files.precision = name_of(run, module)
    secret = recorder.files.secret()
    users = training_data(run, store, module.task, partition, secret)
    if secret is not None:
        recorder.ledger = open_ledger(config, users, protected, secret, recorder.files.path)
    score = partial(recorder.progress.timed, CentralEvaluation(val, threads=run.runtime.reader_threads))
    mechanism = None if recorder.ledger is None else recorder.ledger.mechanism
    training = run_context(run, setup(config, module, users, recorder.files.path, own), score, mechanism)
    return _trained(config, training, recorder)


def _trained(config: TrainingConfig, training: RunContext, recorder: Recorder) -> PyTorchModel:
    """The model after all rounds."""
    amp = training.model.amp_context
    precision = None if amp is None else amp.fast_dtype
    algorithm = config.federated.chosen.start(training)
    if is_main():
        print(f"training is computed in {algorithm.arithmetic(precision)}")
    average = ModelAverage(config.evaluation, training.model.pytorch_model)
    if is_main() and config.evaluation.average != "none":
        print(average)
    recorder.checkpoints.algorithm, recorder.checkpoints.average = algorithm, average

    def evaluated(number: int) -> None:
        with average.in_place():
            recorder.evaluated(number, algorithm.evaluate(state), algorithm.model(state))

    state = algorithm.init(config.seed)
    training.check_applied()
    first, state = recorder.restore(state)
    if first == 0:
        average.add(0)
    for number in range(first, config.federated.num_rounds):
        if number % config.every == 0:
            begin_work(evaluation=number, config=training.config_hash)
            evaluated(number)
        state, line = algorithm.round(state, number)
        average.add(number + 1)
        if number == first:  # the first round decides; a run that goes on after its last has it of its file
            recorder.trained_in(algorithm.arithmetic(precision), number)
            if recorder.ledger is not None:
                recorder.ledger.warn_of_noise()
        if seconds := worker_seconds():
            line["worker_seconds"] = [round(s, 4) for s in seconds]
        recorder.step_done(number, line, state)
    recorder.arithmetic = recorder.arithmetic or algorithm.arithmetic(precision)
    for key, found in (("engine_check", training.check), ("engine_choice", training.tuner)):
        if found is not None and found.outcome is not None:
            recorder.findings[key] = found.outcome
    recorder.findings |= {"traffic": algorithm.bytes(state)._asdict(), **algorithm.findings(state)}
    if training.engine is not None:
        training.engine.close()
    if not recorder.ended:
        evaluated(config.federated.num_rounds)
        recorder.end(state)
    return algorithm.model(state)
