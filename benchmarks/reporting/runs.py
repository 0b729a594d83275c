"""Run directories as reports and figures read them: whole or not, and which are seeds of one experiment."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.config.digests import experiment, experiment_digest, tree_digest
from benchmarks.core.config.sections import BENCHMARKS, TrainingConfig
from benchmarks.core.config.trees import Tree, differences, read_yaml
from benchmarks.core.facts import dataset_facts
from benchmarks.core.weights import sha256_of, weights_facts
from benchmarks.reporting.known import of_project
from benchmarks.reporting.result_types import check_types
from dataset.arrays import FloatArray
from dataset.store.hdf5 import DataFile

DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""The errors with which reading a run's JSON or YAML can end when it is not what it should be."""
FOREIGN = "it is a run of"
"""How the fault of a run of another benchmark begins."""
OTHER_VERSION = "its config is of another version of the code"
ExperimentKey: TypeAlias = tuple[str, str, str | None]


@dataclass(frozen=True)
class RunRecord:
    """One run directory.

    ``fault`` is why nothing of it can be reported; ``results`` is None where the run has not ended.
    ``privacy`` is the privacy.json of a finished private run, ``data`` the facts of its data file, empty
    where they are not known.
    """

    directory: Path
    config: Any = None
    """The benchmark's config, resolved; None where ``fault`` says that it cannot be read."""
    results: Tree | None = None
    privacy: Tree | None = None
    fault: str | None = None
    data: Tree = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether its scores can be reported."""
        return self.fault is None and self.results is not None

    @property
    def outcome(self) -> Tree:
        """The results of a run that has ended."""
        assert self.results is not None
        return self.results

    @property
    def seed(self) -> int:
        """The seed of its config."""
        return int(self.config.seed)

    @property
    def progress(self) -> str:
        """``at round 3 of 10``."""
        unit = self.config.unit
        try:
            return f"at {unit} {int(self.history[-1][unit])} of {self.config.num_steps}"
        except DAMAGE:
            return f"no {unit} is on record"

    @property
    def data_key(self) -> str:
        """What runs on the same data have in common: the content's checksum, or the file's path."""
        if self.results is None:
            return self._data_begun_on()
        known = self.data.get("content_sha256") or self.outcome.get("data_sha256")
        return str(known or self.outcome.get("dataset"))

    def _data_begun_on(self) -> str:
        """The checksum that a run writes down before its first step; the directory where there is none."""
        try:
            return str(_object(self.directory / "checkpoint" / "data.json")["sha256"])
        except DAMAGE:
            return str(self.directory)

    @cached_property
    def experiment(self) -> ExperimentKey:
        """What all seeds of one experiment have in common, and no other run: config, data and weights.

        For a run that has not ended, the weights are those that its config takes today.
        """
        if self.results is None:
            weights = _weights_of(self.config)
        else:
            weights = (self.outcome.get("weights") or {}).get("sha256")
        digest = experiment_digest(dataclasses.asdict(self.config), type(self.config))
        return digest, self.data_key, weights

    @cached_property
    def history(self) -> list[Tree]:
        """The lines of ``metrics.jsonl``; of a run that has not ended, without a line that is being written.

        Raises:
            ValueError: when the file is damaged or missing.
        """
        with reading(self.directory):
            text = (self.directory / "metrics.jsonl").read_text(encoding="utf-8")
            lines = text.splitlines()
            if self.results is None and not text.endswith("\n"):
                lines = lines[:-1]
            return [dict(json.loads(line)) for line in lines]

    @property
    def single_users(self) -> Tree:
        """``per_user.json``, which may be younger than the run; empty where it is missing.

        Raises:
            ValueError: when it is damaged, or of other data, which earlier versions could be given.
        """
        path = self.directory / "per_user.json"
        again = "make it again with benchmarks.flair.per_user"
        try:
            whole = _object(path) if path.is_file() else {}
            images, split = whole.get("images", []), whole.get("split")
            found = {"users": len(images), "images": sum(images)}
            same = all(self.data.get(key, {}).get(split, count) == count for key, count in found.items())
        except DAMAGE as fault:
            raise ValueError(f"{path} is damaged ({fault}): {again}") from fault
        if not same:
            raise ValueError(f"{path} has scores of the users of other data than the run's: {again}")
        return whole

    def series(self, *keys: str) -> tuple[list[int], FloatArray]:
        """The steps whose lines have the first of these keys, and the number at this path of keys in each.

        Raises:
            ValueError: when such a line has no number there.
        """
        with reading(self.directory):
            lines = [line for line in self.history if keys[0] in line]
            steps = [int(_number(line, self.config.unit)) for line in lines]
            return steps, np.array([_number(line, *keys) for line in lines], np.float64)


def _object(path: Path) -> Tree:
    """What a file of JSON holds; raises some error of `DAMAGE` where that is no object."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _weights_of(config: TrainingConfig) -> str | None:
    """SHA-256 of the weights that a config begins from; None from scratch, and where their file is gone."""
    known = config.model.weights_sha256
    with suppress(ValueError, OSError):
        return known or (weights_facts(config, None) or {}).get("sha256")
    return None


def _number(tree: Tree, *keys: str) -> float:
    node: Any = tree
    for key in keys:
        node = node[key]
    if not isinstance(node, (int, float)):
        raise TypeError(f"{' '.join(keys)} is {node!r}, which is no number")
    return node


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Within, what a damaged or missing file of a run raises is a ValueError that names the directory."""
    try:
        yield
    except DAMAGE as fault:
        if f"{directory} is not a complete run" in str(fault):
            raise
        text = " ".join(f"{type(fault).__name__}: {fault}".split())
        raise not_whole(directory, text) from fault


def not_whole(directory: Path, why: str) -> ValueError:
    """The error that a run directory cannot be used."""
    return ValueError(f"{directory} is not a complete run ({why}): leave it out, or make the run again")


def read_run(
    directory: Path, benchmark: Benchmark[Any], scores: Mapping[str, Sequence[str]] | None = None
) -> RunRecord:
    """One directory; nothing that is wrong in it is an error here, it is what the record says.

    Args:
        directory: of a run, of this version of the code or an earlier one.
        benchmark: whose run it is.
        scores: for each split the scores that ``results.json`` must hold.
    """
    try:
        tree = read_yaml(directory / "config.yaml")
        if not tree:
            raise ValueError("it is empty")
    except DAMAGE as fault:
        return RunRecord(directory, fault=f"config.yaml is missing or not readable ({_first_line(fault)})")
    try:
        config = benchmark.read(tree, "config.yaml")
    except ValueError as fault:
        return RunRecord(directory, fault=_foreign(tree, benchmark) or f"{OTHER_VERSION} ({fault})")
    record = RunRecord(directory, config)
    if not (directory / "results.json").exists():
        return record
    try:
        results = _object(directory / "results.json")
        check_types(results)
        privacy = None
        if config.is_private:
            privacy = _object(directory / "privacy.json")
            (epsilon_of if config.local_privacy is None else local_epsilon_of)(privacy)
        fault_found = _fault(directory, config, tree_digest(tree), results, scores or {})
        public = config.privacy is not None and config.privacy.release == "public"
        data = results.get("data") or {}
        if not data and not public and fault_found is None:
            data = _dataset(str(results.get("dataset")))
    except DAMAGE as fault:
        return dataclasses.replace(record, fault=f"its files are damaged ({_first_line(fault)})")
    return dataclasses.replace(record, results=results, privacy=privacy, fault=fault_found, data=data)


def _foreign(tree: Tree, benchmark: Benchmark[Any]) -> str | None:
    """Which other benchmark's a config is; None where it is of none."""
    for other in of_project():
        with suppress(ValueError):
            other.benchmark.read(tree, "config.yaml")
            asked = ".".join(benchmark.directory.relative_to(BENCHMARKS).parts[:-1])
            return f"{FOREIGN} {other.name}, not of benchmarks.{asked}"
    return None


class RunOfAnother(ValueError):
    """A run of another benchmark than the one that is reported."""


def finished_run(
    directory: Path, benchmark: Benchmark[Any], scores: Mapping[str, Sequence[str]]
) -> RunRecord:
    """`read_run` of a run that has ended.

    Raises:
        RunOfAnother: when it is another benchmark's.
        ValueError: when it has not, or cannot be reported.
    """
    record = read_run(directory, benchmark, scores)
    if (record.fault or "").startswith(FOREIGN):
        raise RunOfAnother(record.fault)
    if not record.finished:
        raise not_whole(directory, record.fault or "it has not finished")
    return record


def _first_line(fault: BaseException) -> str:
    text = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {text[0] if text else ''}".rstrip(": ")


def _fault(
    directory: Path, config: TrainingConfig, digest: str, results: Tree, scores: Mapping[str, Sequence[str]]
) -> str | None:
    """What makes the results of a run unfit to be reported."""
    for split, names in scores.items():
        for name in names:
            value = results[split].get(name)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                return f"results.json has {split} {name} = {value!r}"
    for key in ("setting", "seed"):
        if results[key] != getattr(config, key):
            return f"results.json is of {key} {results[key]}, config.yaml of {getattr(config, key)}"
    if results["config_sha256"] != digest:
        return "results.json is of another config than config.yaml: config_sha256 differs"
    model = directory / "model.safetensors"
    if model.exists() and sha256_of(model) != results["model_sha256"]:
        return "model.safetensors is not the model of results.json: model_sha256 differs"
    return None


@cache
def _dataset(path: str) -> Tree:
    """Facts of the data file of a run from before runs kept them; empty where it cannot be opened."""
    try:
        with DataFile(path) as file:
            return dataset_facts(file)
    except (ValueError, OSError):
        return {}


def epsilon_of(privacy: Tree) -> tuple[float, float, bool, float]:
    """(epsilon, delta, simulated, epsilon of the run as executed) of a run with central privacy."""
    executed = privacy["as_executed"]["epsilon_spent"]
    return (
        _epsilon(privacy.get("simulated_system", {}).get("epsilon_spent", executed)),
        float(privacy["delta"]),
        bool(privacy["is_simulation"]),
        _epsilon(executed),
    )


def _epsilon(value: float | str | None) -> float:
    """An epsilon of privacy.json, where "infinite" (null in older files) is no guarantee."""
    return math.inf if value is None or value == "infinite" else float(value)


def origins(runs: Sequence[RunRecord]) -> str:
    """The line of a report that names the machines and the commits of its runs."""
    machines = sorted({str(run.outcome["hardware"]) for run in runs})
    commits = sorted({str(run.outcome["commit"])[:7] for run in runs})
    return f"Hardware: {'; '.join(machines)}. Commits: {', '.join(commits)}."


def statements_of(runs: Iterable[RunRecord]) -> list[Tree]:
    """The ``privacy.json`` of each of these runs that has one."""
    return [run.privacy for run in runs if run.privacy is not None]


def unprotected(statements: Sequence[Tree]) -> str:
    """That the noise of runs of a group can be subtracted, of how many where not of all; empty if of none.

    Args:
        statements: the group's privacy.json.
    """
    seeded = sum(bool(found.get("seeded_for_research_only")) for found in statements)
    if not seeded:
        return ""
    part = "" if seeded == len(statements) else f" in {seeded} of {len(statements)} runs"
    return f"NO PROTECTION{part}, noise from the seed"


def local_epsilon_of(privacy: Tree) -> tuple[float, float, int, float]:
    """The numbers of a run with noise on every device: (epsilon of one update, delta, rounds of the user who
    took part most, what that user has spent at delta).
    """
    return (
        float(privacy["epsilon_of_one_participation"]),
        float(privacy["delta"]),
        int(privacy["participations_at_most"]["so_far"]),
        _epsilon(privacy["epsilon_spent"]),
    )


def split_duplicates(
    records: Iterable[RunRecord],
) -> tuple[list[RunRecord], list[tuple[RunRecord, RunRecord]]]:
    """The first run of each experiment and seed; and the others, each with the one it repeats."""
    first: dict[tuple[ExperimentKey, int], RunRecord] = {}
    others = []
    for record in records:
        kept = first.setdefault((record.experiment, record.seed), record)
        if kept is not record:
            others.append((record, kept))
    return list(first.values()), others


def by_experiment(records: Iterable[RunRecord]) -> list[tuple[RunRecord, ...]]:
    """The seeds of each experiment, ascending. No two of the records are of one experiment and seed."""
    groups: dict[ExperimentKey, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(record.experiment, []).append(record)
    return [tuple(sorted(group, key=lambda run: run.seed)) for group in groups.values()]


def check_seeds(records: Sequence[RunRecord]) -> None:
    """Refuse runs that are not different seeds of one experiment, whose mean would mean nothing.

    Each may begin with a model of its own, where these are models of seeds of one experiment in turn.

    Raises:
        ValueError: a line that names two of the directories and in what their configs differ, or their seed.
    """
    seeds: dict[int, Path] = {}
    first = records[0].directory
    fields = [experiment(dataclasses.asdict(run.config), type(run.config)) for run in records]
    for record, values in zip(records, fields):
        before = (record.outcome.get("weights") or {}).get("experiment_sha256")
        if before is not None:
            values["model.weights_sha256"] = f"a seed of {before}"
    reference = fields[0]
    for record, other in zip(records, fields):
        if changed := differences(reference, other):
            shown = "; ".join(changed[:3])
            raise ValueError(
                f"{first} and {record.directory} are not seeds of the same experiment, because they "
                f"differ in more than the seed ({shown}{'; ...' if changed[3:] else ''}): give only one "
                "of them, or each in a separate command"
            )
        if record.seed in seeds:
            raise ValueError(
                f"{seeds[record.seed]} and {record.directory} have the same config and the same seed, "
                f"{record.seed}: give only one of them"
            )
        seeds[record.seed] = record.directory
