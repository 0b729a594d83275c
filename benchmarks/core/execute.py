"""One run from its command line to its results: what is the same in every benchmark.

`main` reads the command line and starts device and workers; `execute` opens the run directory, trains,
scores, writes ``results.json`` last of all, and shows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from torch import nn

from benchmarks.core.centralised import train_centralised
from benchmarks.core.code_version import commit
from benchmarks.core.config.benchmark import Run
from benchmarks.core.config.digests import experiment_digest
from benchmarks.core.config.sections import Runtime, TrainingConfig
from benchmarks.core.config.trees import Tree, read_yaml
from benchmarks.core.disk import check_disk
from benchmarks.core.experiment import Experiment
from benchmarks.core.extended import check_extension, extend
from benchmarks.core.facts import dataset_facts, hardware, start_facts
from benchmarks.core.features import inputs_of
from benchmarks.core.federated import check_federated, train_federated
from benchmarks.core.final_scores import final_scores
from benchmarks.core.memory import keep_freed_memory
from benchmarks.core.network import network_words
from benchmarks.core.own_code import own_code
from benchmarks.core.private_data import check_private_data
from benchmarks.core.recorder import Checkpoints, Recorder
from benchmarks.core.run_directory import RunDirectory, directory_of, usable
from benchmarks.core.said_once import said_once
from benchmarks.core.secret import statement_path
from benchmarks.core.single_users import own_split
from benchmarks.core.tracking import Tracking
from benchmarks.reporting.tables import text_table
from dataset.cli import held
from dataset.files import OWN, file_digest, own_modules, write_json
from dataset.store.hdf5 import DataFile
from dataset.store.probe import probe
from dataset.store.validate import check_columns
from pfl_ext import checkpoint
from pfl_ext.engine.card import ieee_float32
from pfl_ext.models.classifier import ImageClassifier, probe_checksum
from pfl_ext.models.dropout import count_left_out
from pfl_ext.models.lora import ADAPTERS_FILE, adapter_tensors, adapters_in_words, merged
from pfl_ext.models.positions import resized_in
from pfl_ext.models.trained import untrained_head
from pfl_ext.models.weights import drawn_in, some
from pfl_ext.tasks import score_kinds
from pfl_ext.tasks.task import Task
from pfl_ext.workers.distributed import connected, current, from_any, from_main, is_main

PFL_DEVICE = "PFL_PYTORCH_DEVICE"
"""The environment variable from which pfl takes its device."""


@contextlib.contextmanager
def pfl_device(name: str) -> Iterator[None]:
    """Have pfl use this device within, and float32 there be float32; ``auto`` leaves the choice to pfl.

    Raises:
        ValueError: for a device that torch does not know or that this machine lacks.
    """
    if name == "auto":
        with ieee_float32(get_default_device()):
            yield
        return
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as fault:
        why = str(fault).splitlines()[0].rstrip(".")
        raise ValueError(f"runtime.device is {name!r}: {why}; set it to auto or cpu") from fault
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # else each thread's work on "the GPU" would be on the first
    before = {key: value for key, value in os.environ.items() if key == PFL_DEVICE}
    os.environ[PFL_DEVICE] = name
    try:
        with ieee_float32(device):
            yield
    finally:
        del os.environ[PFL_DEVICE]
        os.environ.update(before)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within, a GPU adds up in the same order each time; a CPU always does. torch says what it cannot repeat.

    cuBLAS reads its variable when CUDA wakes up, so that this must come before.
    """
    before = torch.are_deterministic_algorithms_enabled()
    before_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=before_warns)


@contextlib.contextmanager
def started(runtime: Runtime) -> Iterator[None]:
    """Threads, device and the connection to the other workers, if a launcher started some."""
    keep_freed_memory()
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    workers = connected(
        runtime.device,
        threads=runtime.threads,
        timeout=runtime.worker_timeout_s,
        compress=runtime.reduce == "bf16",
    )
    with workers as device, pfl_device(device), deterministic(runtime.deterministic):
        yield


def main(kind: type[Experiment[Any]], argv: Sequence[str], text: str, module: str) -> None:
    """The training command of a benchmark: parse, train, report; ``text`` and ``module`` are for the help."""
    own_modules()  # a fault in one is no fault of a config, in which it would come up next
    if {"--help", "-h"} & set(argv):
        print(kind.benchmark.help(text, f"python -m {module}"))
        return
    logging.getLogger("absl").setLevel(logging.ERROR)  # dp-accounting logs each RDP order that it skips
    with said_once():
        run, words, data_path = kind.resolve(argv)
        with started(run.runtime):
            kind.ready_data(run, data_path)
            network = network_words(
                kind.benchmark, words, lambda either: [directory_of(either, data_path)], run
            )
            execute(kind.benchmark.parse([*words, *network]) if network else run, data_path, kind)


def execute(run: Run[Any], data_path: Path, kind: Callable[[Run[Any], DataFile], Experiment[Any]]) -> None:
    """Train and report one run, or show the results that it already has.

    Raises:
        ValueError: for whatever can be refused about it, before anything is written.
    """
    config = run.config
    if config.mode == "centralised" and current() is not None:
        raise ValueError("centralised training runs in a single process: start it without a launcher (NP=1)")
    directory = usable(Path(from_main(str(directory_of(run, data_path)) if is_main() else None)))
    if is_main():
        probe(data_path)
    with DataFile(data_path, check_images=config.is_private) as file:  # whose noise is for these images
        experiment = kind(run, file)
        files = RunDirectory(run, directory, file)
        results = files.finished()
        had_ended = results is not None
        if results is None:
            module = _refused_or_built(experiment, directory)
            if is_main():
                check_extension(run, files)
            with checkpoint.sole_owner(directory) if is_main() else contextlib.nullcontext():
                if is_main():
                    extend(run, files)
                results = files.finished() or _train(experiment, files, module, data_path)
                if is_main() and not run.runtime.keep_checkpoints:
                    Checkpoints(directory, run).remove()
    if results is not None and is_main():
        if had_ended:
            print(f"this run has already finished; its results, from {directory}:")
        _show(experiment, results, directory)
        if had_ended:
            print("to train it again, choose another run directory")


def _show(experiment: Experiment[Any], results: Tree, directory: Path) -> None:
    by = experiment.config.evaluation.best_by
    chosen = "is the last" if by == "last" else f"was best on val by {by}"
    print(
        f"\n{experiment.benchmark.name_of(experiment.config)} on {results['dataset']}, "
        f"seed {results['seed']}: the model of {results['unit']} "
        f"{results['best_step']} of {results['rounds']} {chosen}; "
        + (f"{results['wall_clock_s']:.0f} s " if "wall_clock_s" in results else "")
        + f"on {results['hardware']}"
    )
    experiment.show(results)
    if "unaveraged" in results:
        of_test = results["unaveraged"]["test"]
        row = {name: of_test[name] for name in experiment.headline if name in of_test}
        kinds = experiment.score_kinds(experiment.config, results)
        print(text_table({"test, last model, not averaged": row}, kinds))
    if results["best_step"] == 0 < results["rounds"]:
        print(
            f"WARNING: by {by} on val, no {results['unit']} improved the model: these scores and "
            f"model.safetensors are the {_untrained(experiment.config)}; set evaluation.best_by to "
            "last, or to another score",
            file=sys.stderr,
        )
    statement = statement_path(directory)
    if statement.exists() and (paragraph := checkpoint.read_json(statement).get("paragraph")):
        print(f"\n{textwrap.fill(paragraph, 110)}\n")
    print(f"run directory: {directory} (metrics.jsonl, results.json, model.safetensors, plots/)")


def _untrained(config: TrainingConfig) -> str:
    """What a model is that no round made better."""
    federated = config.federated
    if config.mode != "federated" or not federated.chosen.keeps_parts(federated.chosen_options):
        return "untrained model's"
    return (
        f"untrained server model's; users of {federated.name} have models of their own, or of their clusters"
    )


def _refused_or_built(experiment: Experiment[Any], directory: Path) -> ImageClassifier:
    """The network, once everything that can be refused about a run has not been; nothing is written here."""
    _check_data(experiment.file.path)
    for name in ("train", "val", *experiment.final_splits):
        experiment.split(name)
    by = experiment.config.evaluation.best_by
    if by not in ("loss", "last", *experiment.scores):
        scores = ", ".join(dict.fromkeys(("loss", *experiment.scores, "last")))
        raise ValueError(
            f"evaluation.best_by is {by}, which is not one of the scores of this run: choose one of {scores}"
        )
    experiment.check()
    if experiment.config.is_private:
        check_private_data(experiment)
    module, of_users = experiment.module(), 0
    _check_score_kinds(experiment, module.task)
    if experiment.config.mode == "federated":
        of_users = check_federated(experiment, module)
    check_disk(experiment.config, module, of_users, directory)
    return module


def _check_score_kinds(experiment: Experiment[Any], task: Task) -> None:
    """Refuse a user's own class that itself declares something of a score that it does not have."""
    known = dict.fromkeys((*experiment.scores, *experiment.headline, task.user_headline))
    for attribute in () if type(task).__module__.startswith("pfl_ext.") else ("lower_is_better", "units"):
        if wrong := [name for name in vars(type(task)).get(attribute, ()) if name not in known]:
            raise ValueError(
                f"{type(task).__name__}.{attribute} has {wrong[0]!r}, which is not one of the scores of this "
                f"run: choose among {', '.join(known)}"
            )


def _check_data(path: Path) -> None:
    """Refuse a data file whose users or labels were changed after it was made; it states its fingerprint."""
    try:
        check_columns(path)
    except ValueError as damage:
        raise ValueError(f"{damage}, or check it with python -m dataset.store {path}") from None


def _train(
    experiment: Experiment[Any], files: RunDirectory, module: ImageClassifier, data_path: Path
) -> Tree | None:
    """A run that has not ended yet, to its end; its results, on the first worker."""
    run, config, results = experiment.run, experiment.config, None
    facts = {"data": dataset_facts(experiment.file), **start_facts(config, module, run.weights)}
    facts |= {"own_code": found} if (found := own_code(type(config), experiment.benchmark.own)) else {}
    if is_main():
        _announce(experiment, files, module, data_path)
    inputs = inputs_of(experiment, module, data_path)
    files.begin()
    inputs = inputs.standardised(experiment, module, files)
    recorder = Recorder(files, experiment.followed)
    shown = Tracking(run, files.path, data_path.stem, recorder.unit)
    with contextlib.closing(recorder.progress), shown as recorder.tracking:
        with held(recorder.unit) as recorder.held:
            train, val = inputs.split("train"), inputs.split("val")
            if config.mode == "federated":
                users = experiment.partition(), experiment.protected(), own_split(experiment, inputs.split)
                model = train_federated(run, train, val, inputs.module, recorder, *users)
            else:
                model = train_centralised(run, train, val, inputs.module, recorder)
            asked = from_any(recorder.held.number)  # all stop, or none
            recorder.held.number = asked or recorder.held.number  # which may be of this moment
        scores = final_scores(experiment, recorder, model, inputs, module)
        if is_main():
            results = _write_results(experiment, recorder, {**scores, **facts}, module, data_path)
            shown.finish(results, experiment.rows(results))
    return results


def _announce(
    experiment: Experiment[Any], files: RunDirectory, module: ImageClassifier, data_path: Path
) -> None:
    """Say what is trained, and what of it is not as one might think."""
    run, config = experiment.run, experiment.config
    print(
        f"training {experiment.benchmark.name_of(config)} ({config.model.arch}, "
        f"{experiment.description()}) on {data_path}, device {get_default_device()}, into {files.path}",
        flush=True,
    )
    if resized := resized_in(module):
        print(resized)
    if drawn := drawn_in(module):
        print(f"not in the weights, and newly drawn: {some(drawn)}")
    if left_out := count_left_out(module):
        print(
            f"dropout of {config.model.arch} is removed (layers: {left_out}); --model.dropout true keeps it"
        )
    if adapters := adapters_in_words(module):
        print(adapters)
    if config.model.trained == "names" and (head := untrained_head(module.backbone)):
        print(f"{head} makes the outputs, but none of its weights is trained: it stays as it is now")
    if config.mode == "federated" and (warning := experiment.warning()):
        print(warning, file=sys.stderr)
    before = None if run.origin is None else read_yaml(run.origin).get("own_code")
    if None not in (before, config.own_code) and before != config.own_code:
        print(
            f"WARNING: --config {run.origin} is of another version of {os.environ.get(OWN, OWN)}",
            file=sys.stderr,
        )


def _save_model(
    experiment: Experiment[Any], recorder: Recorder, scores: Tree, module: ImageClassifier
) -> ImageClassifier:
    """Write ``model.safetensors``, in whose layers what adapters add is merged, and `ADAPTERS_FILE` with the
    adapters themselves; the merged model."""
    config, directory = experiment.config, recorder.files.path
    of_config = {"config_sha256": recorder.files.config_sha256}
    if adapters := adapter_tensors(module):
        checkpoint.save(directory / ADAPTERS_FILE, adapters, of_config)
    learnt = set((scores["weights"] or {}).get("learnt_from", ()))
    if recorder.ledger is None or not recorder.ledger.is_public:  # which gives no checksum of its data away
        learnt.add(recorder.files.data_sha256)
    module = merged(module)
    grouped = any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
    origin = {
        **of_config,
        "experiment_sha256": experiment_digest(dataclasses.asdict(config), type(config)),
        "classes": list(experiment.class_names),
        "normalisation": config.model.normalisation,
        **({"groups": config.model.groups} if grouped else {}),
        "learnt_from": sorted(learnt),
    }
    checkpoint.save(directory / "model.safetensors", module.state_dict(), origin)
    return module


def _write_results(
    experiment: Experiment[Any], recorder: Recorder, scores: Tree, module: ImageClassifier, data_path: Path
) -> Tree:
    """Model, plots and ``results.json``, which says that the run has ended. A secret is then
    deleted."""
    from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

    config, directory = experiment.config, recorder.files.path
    module = _save_model(experiment, recorder, scores, module)
    title = f"{config.setting} on {data_path.stem}, seed {config.seed}"
    curve, history = directory / "plots" / "training_curve.png", recorder.files.history()
    kinds = module.task.score_kinds
    by = config.evaluation.best_by
    drawn = dict.fromkeys((*experiment.headline, *([] if by in ("loss", "last") else [by])))
    plots.training_curve(history, recorder.unit, tuple(drawn), title, curve, kinds)
    if recorder.ledger is not None:
        plots.privacy_curves(history, title, directory / "plots" / "privacy.png")
    results = {
        "setting": config.setting,
        "classes": list(experiment.class_names),
        "dataset": str(data_path),
        "seed": config.seed,
        "rounds": recorder.num_steps,
        "unit": recorder.unit,
        **({score_kinds.KEY: declared} if (declared := kinds.declared) else {}),
        **scores,
        "wall_clock_s": round(recorder.progress.wall_clock, 3),
        "hardware": hardware(),
        "arithmetic": recorder.arithmetic,
        "commit": commit(),
        "torch": torch.__version__,
        "config_sha256": recorder.files.config_sha256,
        "data_sha256": recorder.files.data_sha256,
        "model_sha256": file_digest(directory / "model.safetensors"),
        "model_probe": probe_checksum(module),
    }
    if "clients" in recorder.findings:  # scores of users' own models; the run's own are the server model's
        results.pop("clients", None)
    if taken := ", ".join(sorted(recorder.findings.keys() & results.keys())):
        print(
            f"WARNING: results.json has {taken} of its own, so the algorithm's are left out", file=sys.stderr
        )
    results = results | recorder.findings | results
    if recorder.ledger is not None:
        results = recorder.ledger.results(results)  # before pictures are made of them
    experiment.draw(results, title, directory / "plots")
    write_json(directory / "results.json", results)
    if recorder.ledger is not None:
        recorder.ledger.secret.close()
    return results
