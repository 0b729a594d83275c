"""Which runs there are, of which benchmark each is, and which of them differ by their seed alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.groups import Comparison, Group, labelled
from benchmarks.compare.measures import Measure, measures, without_repeated_last
from benchmarks.core.config.digests import digest, tree_digest
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import read_yaml
from benchmarks.core.experiment import Experiment
from benchmarks.core.own_code import with_own_code
from benchmarks.reporting.folders import find_runs
from benchmarks.reporting.known import Known, of_own_modules, of_project, of_train_modules
from benchmarks.reporting.runs import (
    DAMAGE,
    RunRecord,
    by_experiment,
    not_whole,
    read_run,
    split_duplicates,
)
from dataset.files import OWN, own_modules


def compare(paths: Iterable[Path]) -> Comparison:
    """Read all runs at or below these paths.

    Raises:
        ValueError: for a path without runs, where none of the runs can be shown, and where a module of the
            user's own cannot be imported.
    """
    own_modules()  # what is wrong with one is said once, not for each run
    paths = list(paths)
    records: list[RunRecord] = []
    left_out: list[str] = []
    trained: dict[Path, type[Experiment[Any]]] = {}
    found: dict[Path, Sequence[Measure]] = {}
    for directory in find_runs(paths):
        try:
            record, trained[directory] = read_any(directory)
            _check_lines(record)
            kinds = trained[directory].score_kinds(record.config, record.results)
            found[directory] = measures(record, kinds)
        except ValueError as fault:
            left_out.append(str(fault))
            continue
        records.append(record)
    if not records:
        raise ValueError(f"no run in {', '.join(map(str, paths))} can be shown: {'; '.join(left_out)}")
    kept, repeated = split_duplicates(sorted(records, key=lambda run: not run.finished))
    left_out += [
        f"{run.directory} repeats {first.directory}: same config and seed" for run, first in repeated
    ]
    shown = {run.directory for run in kept}
    groups = by_experiment(record for record in records if record.directory in shown)
    made = labelled([Group("", runs, trained[runs[0].directory]) for runs in groups])
    kept_measures = without_repeated_last({path: found[path] for path in found if path in shown})
    return Comparison(tuple(made), tuple(left_out), kept_measures)


def read_any(directory: Path) -> tuple[RunRecord, type[Experiment[Any]]]:
    """A run, whichever benchmark it is of.

    The configs of some benchmarks are of one type and differ in their defaults. The run's benchmark is the
    one that ships its setting, and is computed by the files of the user's own that the config counts; else
    one that reads the config as it was written down; else any that can read it. Those of the user's own are
    found in the modules of FL_IMPORT, and in ``benchmarks/*/train.py``.

    Raises:
        ValueError: what is wrong with it, in a line.
    """
    try:
        tree = read_yaml(directory / "config.yaml")
    except DAMAGE as fault:
        raise not_whole(directory, f"config.yaml cannot be read: {' '.join(str(fault).split())}") from None
    if not tree:
        raise not_whole(directory, "config.yaml is empty")
    found: list[tuple[tuple[bool, bool, bool], Known]] = []
    faults = []
    for kinds in (of_project, of_own_modules, of_train_modules):
        if any(ships_it and is_its_code for (ships_it, is_its_code, _), _ in found):
            break  # what is left takes time to import
        for known in kinds():
            try:
                config = known.benchmark.read(tree, "config.yaml")
            except ValueError as fault:
                faults.append(str(fault))
                continue
            ships_it = config.setting in known.benchmark.settings
            rank = ships_it, _is_its_code(config, known), digest(config) == tree_digest(tree)
            found.append((rank, known))
    if not found:
        own = [fault for fault in faults if OWN in fault]
        why = min(own or faults, key=_is_foreign)
        if not own:
            why += f"; if it is of a benchmark of your own, set {OWN} to the file of that"
        raise ValueError(f"{directory}: no benchmark can read its config ({why})")
    _, known = max(found, key=lambda each: each[0])
    record = read_run(directory, known.benchmark)
    if record.fault is not None:
        raise not_whole(directory, record.fault)
    return record, known.experiment()


def _is_its_code(config: TrainingConfig, known: Known) -> bool:
    """Whether a config counts the files of the user's own that this benchmark would be computed by."""
    own = config.own_code
    return own is None or with_own_code(config, known.benchmark.own).own_code == own


def _is_foreign(fault: str) -> tuple[bool, int]:
    """Whether a fault says no more than that the config is another benchmark's; and its length."""
    return "there is no config key" in fault, len(fault)


def _check_lines(record: RunRecord) -> None:
    """Read ``metrics.jsonl``, which a run that has ended may lack: it then has no curves.

    Raises:
        ValueError: when the file is damaged.
    """
    if (record.directory / "metrics.jsonl").exists():
        unit = record.config.unit
        if any(not isinstance(line.get(unit), int) for line in record.history):
            raise not_whole(record.directory, f"a line of metrics.jsonl has no {unit}")
