"""The journal of a local sweep, and by what a later call knows that it is the same sweep."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.digests import config_tree
from benchmarks.core.config.trees import Tree, differences
from benchmarks.sweep.space import Sweep
from dataset.store.hdf5 import DataFile
from dataset.store.probe import probe
from pfl_ext.checkpoint import read_json

IN_NUMBERS = ("engine", "precision", "accumulate", "reduce")
"""The runtime's keys on which the numbers of a trial depend; the others change at most the last digits."""
CONTENT = ("data_sha256", "config")
"""What earlier versions did not note of a sweep."""


def content_of(run: AnyRun, data_path: Path) -> Tree:
    """What the files of all trials hold: the data's checksum, and the config, which has that of the weights.

    Raises:
        ValueError: for a damaged file.
    """
    probe(data_path)  # before this process opens it
    with DataFile(data_path) as file:
        return dict(zip(CONTENT, (file.fingerprint, config_tree(run.config))))


def telling(words: Sequence[str]) -> list[str]:
    """The training's arguments without the runtime's that change no number."""
    kept = tuple(f"--runtime.{name}=" for name in IN_NUMBERS)
    return [word for word in words if not word.startswith("--runtime.") or word.startswith(kept)]


def _completed(known: Tree, identity: Tree, directory: Path) -> Tree:
    """What a sweep is, of which an earlier version noted less: its data are those of its finished trials."""
    missing = {key: identity[key] for key in CONTENT if key in identity and key not in known}
    if "data_sha256" in missing:
        results = map(read_json, sorted(directory.glob("trials/*/results.json")))
        of_trials = (str(each["data_sha256"]) for each in results if "data_sha256" in each)
        missing["data_sha256"] = next(of_trials, missing["data_sha256"])
    return {**known, **missing, "words": telling(known["words"])}


def open_study(directory: Path, sweep: Sweep, identity: Tree) -> optuna.Study:
    """The trials so far, in a directory that belongs to this process.

    Raises:
        ValueError: for a directory of another sweep, or one that cannot be read.
    """
    path = directory / "study.journal"
    Path(f"{path}.lock").unlink(missing_ok=True)  # of a process that was killed while it wrote
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)  # what a power failure left of the last line
    try:
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path))),
            study_name="sweep",
            direction=sweep.ranking.goal,
            pruner=sweep.early_terminate.pruner() if sweep.early_terminate else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        known = study.user_attrs.get("sweep")
    except (ValueError, LookupError, TypeError, AssertionError) as fault:
        raise ValueError(f"{path} is damaged ({fault!r}): choose another --sweep_dir") from fault
    if known is not None and (changed := differences(_completed(known, identity, directory), identity)):
        raise ValueError(f"{directory} has another sweep ({'; '.join(changed)}): choose another --sweep_dir")
    if known != identity:
        study.set_user_attr("sweep", identity)
    return study
