"""Finding and reading run directories, whole or not, for reports and figures."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.core.config.digests import experiment, experiment_digest
from benchmarks.core.config.sections import LocalPrivacySection
from benchmarks.core.config.trees import Tree, read_yaml
from benchmarks.core.facts import dataset_facts
from benchmarks.core.weights import sha256_of
from benchmarks.flair import paper
from benchmarks.flair.config import FLAIR, Config, parse
from benchmarks.reporting.runs import DAMAGE
from dataset.store.hdf5 import DataFile
from pfl_ext.tasks.metrics import COLUMNS

SCORES = (*COLUMNS, "C-AP-binned200", "O-AP-binned200")
LOCAL = "LDP-"
"""How the rows of runs with local differential privacy begin."""
FLAIR_USERS = {"train": 41131, "val": 5141, "test": 5142}
FLAIR_IMAGES = {"train": 345879, "val": 39239, "test": 43960}


@dataclass(frozen=True)
class RunRecord:
    """One run directory. ``fault``: why nothing of it can be reported; ``results`` None: not (yet) ended.

    ``privacy``: the finished run's privacy.json, of central or of local privacy as its config asks for.
    """

    directory: Path
    config: Config | None = None
    results: Tree | None = None
    privacy: Tree | None = None
    fault: str | None = None
    progress: str = ""
    data: Tree = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether its scores can be reported."""
        return self.fault is None and self.results is not None


def read_run(directory: Path) -> RunRecord:
    """One directory; nothing that is wrong in it is an error here, it is what the record says."""
    try:
        tree = read_yaml(directory / "config.yaml")
        if not tree:
            raise ValueError("it is empty")
        digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    except DAMAGE as fault:
        return RunRecord(directory, fault=f"config.yaml is missing or not readable ({_first_line(fault)})")
    try:
        config = FLAIR.read(tree, "config.yaml")
    except ValueError as fault:
        return RunRecord(directory, fault=f"its config is of another version of the code ({fault})")
    record = RunRecord(directory, config, progress=_progress(directory, config))
    if not (directory / "results.json").exists():
        return record
    try:
        results = json.loads((directory / "results.json").read_text())
        privacy = None
        if config.privacy is not None or config.local_privacy is not None:
            privacy = json.loads((directory / "privacy.json").read_text())
            (epsilon_of if config.local_privacy is None else local_epsilon_of)(privacy)
        fault_found = _fault(directory, config, digest, results)
        data = results.get("data") or _dataset(str(results.get("dataset"))) if fault_found is None else {}
    except DAMAGE as fault:
        return dataclasses.replace(record, fault=f"its files are damaged ({_first_line(fault)})")
    return dataclasses.replace(record, results=results, privacy=privacy, fault=fault_found, data=data)


def _first_line(fault: BaseException) -> str:
    text = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {text[0] if text else ''}".rstrip(": ")


def _progress(directory: Path, config: Config) -> str:
    federated = config.mode == "federated"
    unit = "round" if federated else "epoch"
    steps = config.federated.num_rounds if federated else config.centralised.num_epochs
    try:
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        step = int(json.loads(lines[-1])[unit]) if lines else 0
    except DAMAGE:
        return "no round is on record" if federated else "no epoch is on record"
    return f"at {unit} {step} of {steps}"


def _fault(directory: Path, config: Config, digest: str, results: Tree) -> str | None:
    """What makes the results of a run unfit to be reported."""
    for split in ("val", "test"):
        for name in SCORES:
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


def is_flair(data: Tree) -> bool:
    """Whether these are facts of FLAIR itself: its users and images, not drawn ones."""
    return (
        data.get("source") != "mini"
        and data.get("users") == FLAIR_USERS
        and data.get("images") == FLAIR_IMAGES
    )


def data_key(record: RunRecord) -> str:
    """What two runs on the same data have in common: the content's checksum, or the file's path."""
    assert record.results is not None
    known = record.data.get("content_sha256") or record.results.get("data_sha256")
    return str(known or record.results.get("dataset"))


def epsilon_of(privacy: Tree) -> tuple[float, float, bool, float]:
    """(epsilon, delta, simulated, epsilon of the run as executed)."""
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


def local_epsilon_of(privacy: Tree) -> tuple[float, float, int, float]:
    """With noise on every device: (epsilon of one update, delta, rounds of the user who took part most,
    what that user has spent at delta).
    """
    return (
        float(privacy["epsilon_of_one_participation"]),
        float(privacy["delta"]),
        int(privacy["participations_at_most"]["so_far"]),
        _epsilon(privacy["epsilon_spent"]),
    )


def fields_of(config: Config) -> Tree:
    """The fields that seeds of one experiment share, dotted, without the name of the setting.

    The weights are left out: a row's label has them from ``results.json``.
    """
    fields = experiment(dataclasses.asdict(config), Config)
    return {k: v for k, v in fields.items() if k not in ("setting", "model.weights_sha256")}


@cache
def _shipped(setting: str, scale: str | None, recipe: str | None) -> dict[str, Any]:
    words = [] if scale is None else ["--scale", scale]
    words += [] if recipe is None else ["--recipe", recipe]
    if not setting.startswith(LOCAL):
        return fields_of(parse(["--config", setting.lower(), *words]).config)
    config = parse(["--config", setting.replace(LOCAL, "fl-", 1).lower(), *words]).config
    users = dataclasses.replace(config.federated, weighting="users")
    return fields_of(dataclasses.replace(config, federated=users, local_privacy=LocalPrivacySection()))


@dataclass(frozen=True)
class Variant:
    """A run's config, said as a setting, a scale, and the fields in which it differs from them.

    A run with local differential privacy is of none of the paper's settings, whatever config it came from:
    ``LDP-R-17`` is FL-R-17, every user weighted alike, with the defaults of ``local_privacy``.
    """

    setting: str
    scale: str | None
    differences: tuple[str, ...]

    @property
    def essential(self) -> tuple[str, ...]:
        """The differences that make another experiment of it; the noise of the paper's own code does not."""
        return tuple(text for text in self.differences if text != "privacy.noise=paper_bug")

    @property
    def reason(self) -> str:
        """The essential differences as a reason why it is not the paper's row."""
        return f"config differs: {', '.join(self.essential)}"

    @property
    def label(self) -> str:
        """``FL-R-17, data.partition=iid``."""
        return ", ".join((self.setting, *self.differences))


def variant(config: Config) -> Variant:
    """The shortest way to say a config, in terms of what is shipped."""
    local = config.local_privacy is not None
    if config.setting.lower() not in FLAIR.settings or config.setting not in paper.settings():
        return Variant(
            config.setting, None, (*(["local differential privacy"] if local else []), "its own config")
        )
    setting = LOCAL + config.setting.split("-", 1)[1] if local else config.setting
    own, best = fields_of(config), None
    for recipe in (None, "pfl"):
        for scale in (None, *FLAIR.scales):
            try:
                base = _shipped(setting, scale, recipe)
            except ValueError:
                continue  # the recipe does not go with the setting
            keys = [key for key in {**base, **own} if base.get(key) != own.get(key)]
            if "privacy" in own and "privacy" not in base:  # none of its keys, where the row has them
                keys = ["privacy", *(key for key in keys if not key.startswith("privacy"))]
            differences = [f"{key}={_word(own.get(key))}" for key in keys]
            made = Variant(setting, scale, (*([f"recipe={recipe}"] if recipe else []), *differences))
            if best is None or len(made.differences) < len(best.differences):
                best = made
    assert best is not None
    return best


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


Key: TypeAlias = tuple[str, str, str | None]


def experiment_key(record: RunRecord) -> Key:
    """What all seeds of one experiment have in common, and no other run: config, data and weights."""
    assert record.config is not None
    assert record.results is not None
    weights = record.results.get("weights") or {}
    tree = dataclasses.asdict(record.config)
    return experiment_digest(tree, Config), data_key(record), weights.get("sha256")


def split_duplicates(
    records: Sequence[RunRecord],
) -> tuple[list[RunRecord], list[tuple[RunRecord, RunRecord]]]:
    """The first finished run of each experiment and seed; and the others, each with the one it repeats."""
    first: dict[tuple[Key, int], RunRecord] = {}
    others = []
    for record in records:
        if not record.finished:
            continue
        assert record.config is not None
        key = (experiment_key(record), record.config.seed)
        if key in first:
            others.append((record, first[key]))
        else:
            first[key] = record
    return list(first.values()), others
