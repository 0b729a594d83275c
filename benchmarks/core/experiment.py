"""One run from its config to its results: what is the same in every benchmark.

A benchmark says what it adds as an `Experiment`; `execute` opens the run directory, trains, scores, writes
``results.json`` last of all, and shows it. `start` comes before: the device, the threads, the workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.centralised import train_centralised
from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.digests import short_digest
from benchmarks.core.config.sections import Runtime, TrainingConfig
from benchmarks.core.config.trees import Tree
from benchmarks.core.facts import commit, dataset_facts, hardware, start_facts
from benchmarks.core.federated import check_federated, train_federated
from benchmarks.core.privacy_statement import ProtectedUnit
from benchmarks.core.recorder import Recorder, columns
from benchmarks.core.secret import statement_path
from benchmarks.core.tracking import tracking
from benchmarks.reporting import plots
from dataset.cli import held
from dataset.files import file_digest, write_json
from dataset.store.hdf5 import DataFile
from dataset.store.probe import probe
from pfl_ext import checkpoint
from pfl_ext.data.federated_dataset import ImageStore, Partition
from pfl_ext.evaluation import CentralEvaluation
from pfl_ext.models.classifier import ImageClassifier, build_backbone, probe_checksum
from pfl_ext.randomness import torch_stream
from pfl_ext.tasks.objectives import ObjectiveName
from pfl_ext.workers.distributed import connected, current, is_main

PFL_DEVICE = "PFL_PYTORCH_DEVICE"  # the environment variable by which pfl is told


@dataclass(frozen=True)
class Experiment:
    """What a benchmark adds to training and scoring."""

    task: str
    """For the screen: ``17 labels``."""
    split: Callable[[str], ImageStore]
    """The store of ``train``, ``val`` or ``test``."""
    module: Callable[[], ImageClassifier]
    """The network before its first step."""
    partition: Partition | None
    """Who owns the training images; None: the store's users."""
    protected: ProtectedUnit
    """Whom a private run's guarantee is about: the data's users, or the clients of a drawn partition."""
    final_splits: tuple[str, ...]
    """What the last and the best model are scored on at the end."""
    headline: tuple[str, ...]
    """The columns that the training curve shows, in percent."""
    results: Callable[[Recorder, PyTorchModel, Mapping[str, Metrics]], Tree]
    """What ``results.json`` holds besides; given the best model and its metrics on each of `final_splits`."""
    draw: Callable[[Tree, str, Path], None]
    """Pictures besides the training curve: of the results, with a title, into a folder."""
    rows: Callable[[Tree], Mapping[str, Mapping[str, float]]]
    """The final table of some results, by the name of the row."""
    show: Callable[[Tree], None]
    """That table, on the screen."""
    followed: str = "val"
    """What the scores of ``split("val")`` over the rounds are called: ``val``, by which a model may be
    chosen, or ``tracked``, which are those of test and choose nothing."""


def build_model(
    config: TrainingConfig,
    num_labels: int,
    weights: Path | None,
    objective: ObjectiveName = "multi_label",
) -> ImageClassifier:
    """The network of a setting: from scratch with GroupNorm, or pretrained with frozen statistics."""
    if weights is None and config.model.weights_sha256 is not None:
        raise ValueError(
            f"the config asks for weights with SHA-256 {config.model.weights_sha256}: give their file with "
            "--weights"
        )
    backbone = build_backbone(
        config.model.arch,
        num_labels,
        norm="frozen_batch" if config.model.pretrained else "group",
        weights=(weights or "imagenet") if config.model.pretrained else None,
        init=config.model.init,
        generator=torch_stream(config.seed, "model initialisation"),
        groups=config.model.groups,
        input_size=config.model.input_size,
        bottleneck=config.model.bottleneck,
        train=config.model.trained,
    )
    exact = config.augment.crop != "resized"
    return ImageClassifier(
        backbone, input_size=config.model.input_size, exact_crops=exact, objective=objective
    )


@contextlib.contextmanager
def pfl_device(name: str) -> Iterator[None]:
    """Have pfl use this device within; ``auto`` leaves the choice to pfl.

    :raises ValueError: for a device that torch does not know or that this machine lacks.
    """
    before = os.environ.get(PFL_DEVICE)
    try:
        if name != "auto":
            torch.empty(0, device=name)
            os.environ[PFL_DEVICE] = name
    except (RuntimeError, AssertionError) as fault:
        raise ValueError(f"runtime.device is {name!r}: {str(fault).splitlines()[0]}") from fault
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(PFL_DEVICE, None)
        else:
            os.environ[PFL_DEVICE] = before


@contextlib.contextmanager
def started(runtime: Runtime) -> Iterator[None]:
    """Threads, device and the connection to the other workers, if a launcher started some."""
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    workers = connected(
        runtime.device,
        threads=runtime.threads,
        timeout=runtime.worker_timeout_s,
        compress=runtime.reduce == "bf16",
    )
    with workers as device, pfl_device(device):
        yield


def execute(run: AnyRun, data_path: Path, opened: Callable[[DataFile], Experiment]) -> None:
    """Train and report one run, or show the results that it already has."""
    config = run.config
    federated = config.mode == "federated"
    if not federated and current() is not None:
        raise ValueError("centralised training runs in one process: start it without a launcher, NP=1")
    directory = run.run_dir or Path("runs") / f"{config.setting.lower()}-{data_path.stem}-seed{config.seed}"
    directory = Path(str(directory).replace("{digest}", short_digest(config)))
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--run_dir {directory} is a file: choose another")
    if is_main():
        probe(data_path)
    with DataFile(data_path) as file:
        experiment = opened(file)
        num_steps = config.federated.num_rounds if federated else config.centralised.num_epochs
        recorder = Recorder(run, directory, num_steps, "round" if federated else "epoch", file.fingerprint)
        recorder.followed, recorder.content_sha256 = experiment.followed, file.content_sha256
        results = recorder.finished()
        had_ended = results is not None
        if results is None:
            module = _refused_or_built(run, experiment)
            with sole_owner(directory):
                results = recorder.finished() or _train(run, experiment, recorder, module, file, data_path)
                recorder.tidy()
    if results is not None and is_main():
        if had_ended:
            print(f"this run had ended before; its results, from {directory}:")
        by = config.evaluation.best_by
        chosen = "is the last" if by == "last" else f"was best on val by {by}"
        print(
            f"\n{results['setting']} on {results['dataset']}, seed {results['seed']}: the model of "
            f"{results['unit']} {results['best_step']} of {results['rounds']} {chosen}; "
            + (f"{results['wall_clock_s']:.0f} s " if "wall_clock_s" in results else "")
            + f"on {results['hardware']}"
        )
        experiment.show(results)
        statement = statement_path(directory)
        if statement.exists() and (paragraph := checkpoint.read_json(statement).get("paragraph")):
            print(f"\n{paragraph}\n")
        print(f"run directory: {directory} (metrics.jsonl, results.json, model.safetensors, plots/)")


def sole_owner(directory: Path) -> contextlib.AbstractContextManager[None]:
    """The directory locked by the first worker."""
    return checkpoint.sole_owner(directory) if is_main() else contextlib.nullcontext()


def _refused_or_built(run: AnyRun, experiment: Experiment) -> ImageClassifier:
    """The network, once everything that can be refused about a run has not been; nothing is written here."""
    for name in ("train", "val", *experiment.final_splits):
        experiment.split(name)
    module = experiment.module()
    if run.config.mode == "federated":
        check_federated(run, experiment.split("train"), module, experiment.partition)
    return module


def _train(
    run: AnyRun,
    experiment: Experiment,
    recorder: Recorder,
    module: ImageClassifier,
    file: DataFile,
    data_path: Path,
) -> Tree | None:
    """A run that has not ended yet, to its end; its results, on the first worker."""
    config, directory, results = run.config, recorder.directory, None
    facts = {"data": dataset_facts(file), **start_facts(config, module, run.weights)}
    if is_main():
        print(
            f"training {config.setting} ({experiment.task}) on {data_path}, device {get_default_device()}, "
            f"into {directory}",
            flush=True,
        )
    recorder.begin()
    shown = tracking(run, directory, data_path.stem, recorder.unit)
    with contextlib.closing(recorder), shown as recorder.tracking:
        with held(recorder.unit) as recorder.held:
            train, val = experiment.split("train"), experiment.split("val")
            if config.mode == "federated":
                partition, protected = experiment.partition, experiment.protected
                model = train_federated(run, train, val, module, recorder, partition, protected)
            else:
                model = train_centralised(run, train, val, module, recorder)
        scores = _final_scores(experiment, recorder, model)
        if is_main():
            results = _write_results(experiment, recorder, {**scores, **facts}, module, data_path)
            if recorder.tracking is not None:
                recorder.tracking.finish(results, experiment.rows(results))
    return results


def _final_scores(experiment: Experiment, recorder: Recorder, model: PyTorchModel) -> Tree:
    """The last model's and the best one's; the model is left at the best."""
    threads = recorder.run.runtime.reader_threads
    evaluations = {
        name: CentralEvaluation(experiment.split(name), threads=threads) for name in experiment.final_splits
    }
    metrics = {name: evaluation(model) for name, evaluation in evaluations.items()}
    last = {name: columns(scored) for name, scored in metrics.items()}
    if recorder.best.step != recorder.num_steps:
        model.pytorch_model.load_state_dict(recorder.best_weights())
        metrics = {name: evaluation(model) for name, evaluation in evaluations.items()}
    best = {name: columns(scored) for name, scored in metrics.items()}
    return {
        **best,
        "last": last,
        "best_step": recorder.best.step,
        **experiment.results(recorder, model, metrics),
    }


def _write_results(
    experiment: Experiment, recorder: Recorder, scores: Tree, module: ImageClassifier, data_path: Path
) -> Tree:
    """``model.safetensors``, plots and ``results.json``, which says that the run has ended.

    The secret of a private run is deleted after that.
    """
    config, directory = recorder.run.config, recorder.directory
    of_config = {"config_sha256": recorder.config_sha256}
    checkpoint.save(directory / "model.safetensors", module.state_dict(), of_config)
    title = f"{config.setting} on {data_path.stem}, seed {config.seed}"
    curve = directory / "plots" / "training_curve.png"
    plots.training_curve(recorder.history(), recorder.unit, experiment.headline, title, curve)
    if recorder.ledger is not None:
        plots.privacy_curves(recorder.history(), title, directory / "plots" / "privacy.png")
    results = {
        "setting": config.setting,
        "dataset": str(data_path),
        "seed": config.seed,
        "rounds": recorder.num_steps,
        "unit": recorder.unit,
        **scores,
        "wall_clock_s": round(recorder.wall_clock, 3),
        "hardware": hardware(),
        "arithmetic": recorder.arithmetic,
        "commit": commit(),
        "torch": torch.__version__,
        **of_config,
        "data_sha256": recorder.data_sha256,
        "model_sha256": file_digest(directory / "model.safetensors"),
        "model_probe": probe_checksum(module),
    }
    if recorder.ledger is not None:
        results = recorder.ledger.results(results)  # before pictures are made of them
    experiment.draw(results, title, directory / "plots")
    write_json(directory / "results.json", results)
    if recorder.ledger is not None:
        recorder.ledger.secret.close()
    return results
