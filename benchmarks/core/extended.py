"""``--extend``: a run that goes on where a shorter one of the same config ended, as if it had been this long.

The shorter run is left as it is; what a run goes on from is copied into the new directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.digests import tree_digest
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree, read_yaml
from benchmarks.core.recorder import Checkpoints
from benchmarks.core.run_directory import LENGTHS, RunDirectory, has_begun, has_checkpoint, run_differences
from dataset.files import replacing, write_bytes
from pfl_ext import checkpoint
from pfl_ext.engine.tuning import CHOICE


def check_extension(run: AnyRun, files: RunDirectory) -> None:
    """Refuse a run that would not be what ``run.extend`` had been at this length, before anything is written.

    Raises:
        ValueError: one line with the reason.
    """
    if run.extend is None:
        return
    asked = f"--extend {run.extend}"
    if has_begun(files.path):
        print(f"the run in {files.path} has begun: it continues by itself, and {asked} has no effect")
        return
    if not has_begun(run.extend):
        raise ValueError(f"{asked} has no run: give the folder of a run")
    known = read_yaml(run.extend / "config.yaml")
    length = LENGTHS[0 if run.config.mode == "federated" else 1]
    changed = run_differences(known, run)
    if [change for change in changed if not change.startswith(f"{length}: ")]:
        raise ValueError(f"{asked} is a run of another config ({'; '.join(changed)}): change only {length}")
    assert run.benchmark is not None
    old = run.benchmark.read(known, "config.yaml")
    _check_steps(asked, run.config, old, length)
    account = _account(run)
    if account["config_sha256"] != tree_digest(known):
        raise ValueError(f"the config.yaml in {asked} does not belong to its checkpoint: restore it")
    if account["ended"] and old.num_steps % old.every:
        raise ValueError(
            f"{asked} was last scored after {old.num_steps} {old.unit}s, which is not a multiple of "
            f"evaluation.every_{old.unit}s = {old.every}: start a new run"
        )
    data = run.extend / "checkpoint" / "data.json"
    if not data.exists() or checkpoint.read_json(data).get("sha256") != files.data_sha256:
        raise ValueError(f"{asked} is a run on other data: give its data file with --data_path")


def _check_steps(asked: str, config: TrainingConfig, old: TrainingConfig, length: str) -> None:
    """Refuse a length by which the steps that were made would have been others, or no step is left."""
    if config.num_steps <= old.num_steps:
        raise ValueError(f"{asked} already has {old.num_steps} {config.unit}s: set {length} to more")
    if config.is_private:
        raise ValueError(
            f"{asked} is private, and its noise was computed for {old.num_steps} rounds, so it cannot "
            "be extended: start a new run"
        )
    if config.mode == "federated" and (
        config.federated.chosen.reads_length or config.federated.chosen.only_last
    ):
        raise ValueError(
            f"{asked} uses federated.algorithm {config.federated.name}, whose rounds depend on the "
            "number of rounds, so it cannot be extended: start a new run"
        )
    if any(_rates(config, step) != _rates(old, step) for step in range(old.num_steps)):
        raise ValueError(
            f"{asked} has a learning rate schedule that depends on {length}, so a run of "
            f"{config.num_steps} {config.unit}s would have used other rates: start a new run"
        )


def extend(run: AnyRun, files: RunDirectory) -> None:
    """Copy what ``run.extend`` goes on from. The caller holds the directory's lock, and has checked it."""
    if run.extend is None or has_begun(files.path):
        return
    there = Checkpoints(run.extend, run)
    metrics, found = run.extend / "metrics.jsonl", []
    whole = metrics.read_bytes() if metrics.exists() else b""
    for path in (checkpoint.previous(there.last), there.last):  # the one before: if users' states are damaged
        with contextlib.suppress(ValueError, OSError):
            found.append((path.name, *checkpoint.load(path)))
    for _, _, account in found:
        lines = whole[: account["metrics_bytes"]]
        if hashlib.sha256(lines).hexdigest() != account["metrics_sha256"]:
            raise ValueError(
                f"--extend {run.extend}: the metrics.jsonl in it does not belong to its checkpoint: "
                "restore it"
            )
        if account["ended"]:  # the last line is no step's: this run scores that model before its next step
            lines = b"".join(lines.splitlines(keepends=True)[:-1])
        account |= {"ended": False, "config_sha256": files.config_sha256, "metrics_bytes": len(lines)}
        account |= {"metrics_sha256": hashlib.sha256(lines).hexdigest()}
    write_bytes(files.path / "metrics.jsonl", lines)
    for path in (*there.of_users, run.extend / CHOICE):
        if path.exists():
            with replacing(files.path / path.relative_to(run.extend)) as copy:
                shutil.copyfile(path, copy)
    for name, tensors, account in found:
        checkpoint.save(files.path / "checkpoint" / name, tensors, account)


def _account(run: AnyRun) -> Tree:
    assert run.extend is not None
    if not has_checkpoint(run.extend):
        raise ValueError(
            f"--extend {run.extend} has no checkpoint, because a finished run keeps it only with "
            "--runtime.keep_checkpoints true: start a new run"
        )
    return checkpoint.load_newest(Checkpoints(run.extend, run).last)[1]


def _rates(config: TrainingConfig, step: int) -> tuple[float, ...]:
    if config.mode == "centralised":
        central = config.centralised
        return (central.scheduled(central.learning_rate, step, central.num_epochs),)
    return config.local_rate(step), config.server.rate(step, config.federated.num_rounds)
