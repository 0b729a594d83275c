"""What FLAIR's runs leave besides what every run does: each class, each user, the paper's rows.

``per_user.json`` holds the test users one by one, and after local fine-tuning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.trees import Tree
from benchmarks.flair import paper
from benchmarks.flair.config import Config
from benchmarks.flair.table import classes_without_positives
from benchmarks.reporting.tables import text_table
from dataset.arrays import FloatArray, IntArray
from dataset.files import write_json
from dataset.store.views import LabelSetView
from pfl_ext.algorithms.per_user import (
    Personalisation,
    PersonalScores,
    per_user_scores,
    personalise,
    quantiles,
    shot_table,
    spreads_by_group,
)
from pfl_ext.data.sampling import BatchConfig, LocalSampling
from pfl_ext.evaluation import SCORES
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.multi_label_scores import PER_USER, MultiLabelScores, average_precision, for_people, shown
from pfl_ext.workers.distributed import is_main

SPLIT = "test"
"""The split whose users are scored one by one."""


def class_scores(
    config: Config,
    task: LabelSetView,
    directory: Path,
    model: PyTorchModel,
    metrics: Mapping[str, Metrics],
    trained: Collection[str],
) -> Tree:
    """The best model's AP and prevalence of each class, few-shot classes apart; users if asked for.

    ``trained``: the users who trained, by their ids in test.
    """
    scores = metrics["test"][SCORES]
    ap = 100 * average_precision(scores.scores(), scores.targets())
    positives = {name: int(n) for name, n in zip(task.label_names, scores.targets().sum(0))}
    per_class = {name: float(value) for name, value in zip(task.label_names, ap)}
    users: Tree = {}
    if config.evaluation.per_user or config.personal.num_epochs:
        users = write_users(directory, config, model.pytorch_model, task, scores, trained, model.amp_context)
    counts = task.split("train").label_counts()
    return {
        "per_class_ap": per_class,
        "shots": shot_table(per_class, positives, counts, config.evaluation.few_shot_below),
        **users,
        "prevalence": {name: float(p) for name, p in zip(task.label_names, scores.targets().mean(0))},
    }


def _users_columns(scored: MultiLabelScores, offsets: IntArray) -> dict[str, FloatArray]:
    return per_user_scores(MultiLabel(), scored.scores(), scored.targets(), offsets)


def _lists(values: Mapping[str, FloatArray]) -> Tree:
    """The columns as lists for JSON: percent to 4 decimals, null where there is no number."""
    return {
        name: [None if np.isnan(value) else round(float(value), 4) for value in values[name]]
        for name in PER_USER
    }


def _quantiles(values: Mapping[str, FloatArray]) -> Tree:
    return {name: quantiles(values[name]) for name in PER_USER}


def _personalisation(config: Config) -> Personalisation:
    """The `personal` section, with the augmentation of training."""
    fields = dataclasses.asdict(config.personal)
    batches = BatchConfig(num_epochs=fields.pop("num_epochs"), batch_size=fields.pop("batch_size"))
    sampling = LocalSampling.of(batches, config.augment, config.model.input_size, config.keys)
    return Personalisation(sampling, **fields)


def _personal_tree(config: Config, scores: PersonalScores) -> tuple[Tree, Tree]:
    """What goes into per_user.json, and its summary."""
    parts = {"before": scores.before, "after": scores.after}
    columns = {when: _users_columns(part, scores.offsets) for when, part in parts.items()}
    change = {name: columns["after"][name] - columns["before"][name] for name in PER_USER}
    summary = {
        "config": dataclasses.asdict(config.personal),
        "users": len(scores.users),
        "images_trained_on": int(scores.trained_on.sum()),
        "images_scored": int(scores.offsets[-1]),
        "all_images": {when: part.summary() for when, part in parts.items()},
        "quantiles": {when: _quantiles(values) for when, values in {**columns, "change": change}.items()},
        "share_of_users_better": {name: float(np.mean(change[name] > 0)) for name in ("C-AP", "O-AP")},
        "share_of_users_worse": {name: float(np.mean(change[name] < 0)) for name in ("C-AP", "O-AP")},
    }
    whole = {
        **summary,
        "user_ids": list(scores.users),
        "trained_on": scores.trained_on.tolist(),
        "scored_on": np.diff(scores.offsets).tolist(),
        **{when: _lists(values) for when, values in columns.items()},
    }
    return whole, summary


def write_users(
    directory: Path,
    config: Config,
    module: ImageClassifier,
    task: LabelSetView,
    scored: MultiLabelScores,
    trained: Collection[str],
    amp: AbstractContextManager[Any] | None = None,
) -> Tree:
    """Write ``per_user.json`` and ``plots/per_user.png`` of a model; the summaries for ``results.json``.

    All workers call this, and share the fine-tuning; the first writes. ``amp``: see `personalise`.

    Raises:
        ValueError: when no user has as many images as ``personal.min_images``.
    """
    from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

    store = task.split(SPLIT)
    values = _users_columns(scored, store.user_offsets)
    summary: Tree = {"users": len(store.user_ids), "quantiles": _quantiles(values)}
    whole: Tree = {
        "split": SPLIT,
        "setting": config.setting,
        **summary,
        "user_ids": list(store.user_ids),
        "images": np.diff(store.user_offsets).tolist(),
        **_lists(values),
    }
    violins = {"all users": values["O-AP"]}
    if config.personal.num_epochs:
        personal = personalise(module, store, _personalisation(config), amp)
        whole["personal"], summary["personal"] = _personal_tree(config, personal)
        for when in ("before", "after"):
            column = np.array(whole["personal"][when]["O-AP"], np.float64)
            violins[f"held-out images,\n{when} fine-tuning"] = column
    if is_main():
        write_json(directory / "per_user.json", whole)
        title = f"{config.setting}: {len(store.user_ids)} test users"
        picture = directory / "plots" / "per_user.png"
        plots.per_user_violins(violins, f"{shown('O-AP')} of one user (%)", title, picture)
    columns = {name: values[name] for name in PER_USER}
    sizes = np.diff(store.user_offsets)
    groups = spreads_by_group(store.user_ids, trained, sizes, columns)
    return {"per_user": summary, "clients": groups}


def _reasons_against(config: Config, results: Tree) -> Iterator[str]:
    return paper.reasons_against(config, results, results.get("data", {}))


def draw(config: Config, results: Tree, title: str, folder: Path) -> None:
    """AP of each class, beside the paper's where the run can be compared with it."""
    from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

    theirs = {} if any(_reasons_against(config, results)) else paper.per_class(results["setting"])
    ap, prevalence = results["per_class_ap"], results["prevalence"].values()
    path = folder / "per_class_ap.png"
    plots.per_class_bars(list(ap), list(ap.values()), list(prevalence), theirs, title, path)


def final_rows(config: Config, results: Tree) -> dict[str, Mapping[str, float]]:
    """The rows of the final table: val, test, test of the last model; and the paper's, where the run can be
    compared with it.
    """
    rows: dict[str, Mapping[str, float]] = {
        "val, best model": for_people(results["val"]),
        "test, best model": for_people(results["test"]),
        "test, last model": for_people(results["last"]["test"]),
    }
    theirs = paper.row(results["setting"])
    if theirs and not any(_reasons_against(config, results)):
        rows["test, FLAIR paper"] = theirs
    return rows


def show(config: Config, results: Tree) -> None:
    """The table of results beside the paper's row, or why that row does not stand there."""
    print(text_table(final_rows(config, results)))
    guess = 100 * np.mean(list(results["prevalence"].values()))
    print(f"{shown('C-AP')} of guessing (mean label prevalence on test): {guess:.1f}")
    if absent := classes_without_positives(results):
        print(absent)
    reasons = tuple(_reasons_against(config, results)) if paper.row(results["setting"]) else ()
    if reasons:
        print(f"not comparable with the paper's {results['setting']}: {'; '.join(reasons)}")
