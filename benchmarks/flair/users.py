"""Test users one by one, and after local fine-tuning: ``per_user.json`` of a run and its picture.

Shape letters: U users, N images of the test split, K labels.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.core.config.trees import Tree
from benchmarks.flair.config import Config
from dataset.files import write_json
from dataset.store.label_sets import LabelSetView
from pfl_ext.algorithms.per_user import (
    FloatArray,
    Personalisation,
    PersonalScores,
    per_user_scores,
    personalise,
    quantiles,
)
from pfl_ext.data.federated_dataset import IntArray
from pfl_ext.data.sampling import BatchConfig, LocalSampling
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.multi_label_scores import PER_USER, MultiLabelScores, shown
from pfl_ext.workers.distributed import is_main

SPLIT = "test"


def personalisation(config: Config) -> Personalisation:
    """The `personal` section, with the augmentation of training."""
    personal = config.personal
    batches = BatchConfig(num_epochs=personal.num_epochs, batch_size=personal.batch_size)
    sampling = LocalSampling.of(batches, config.augment, config.model.input_size)
    return Personalisation(
        sampling,
        personal.learning_rate,
        personal.max_grad_norm,
        personal.train_share,
        personal.min_images,
        personal.split_seed,
    )


def _columns(values: dict[str, FloatArray]) -> Tree:
    """Lists for JSON: percent to 4 decimals, null where there is no number."""
    return {
        name: [None if np.isnan(value) else round(float(value), 4) for value in values[name]]
        for name in PER_USER
    }


def _quantiles(values: dict[str, FloatArray]) -> Tree:
    return {name: quantiles(values[name]) for name in PER_USER}


def _user_scores(scored: MultiLabelScores, offsets: IntArray) -> dict[str, FloatArray]:
    return per_user_scores(MultiLabel(), scored.scores(), scored.targets(), offsets)


def _personal_tree(config: Config, scores: PersonalScores) -> tuple[Tree, Tree]:
    """What goes into per_user.json, and its summary."""
    parts = {"before": scores.before, "after": scores.after}
    scored = {when: _user_scores(part, scores.offsets) for when, part in parts.items()}
    change = {name: scored["after"][name] - scored["before"][name] for name in PER_USER}
    summary = {
        "config": dataclasses.asdict(config.personal),
        "users": len(scores.users),
        "images_trained_on": int(scores.trained_on.sum()),
        "images_scored": int(scores.offsets[-1]),
        "all_images": {when: part.summary() for when, part in parts.items()},
        "quantiles": {**{when: _quantiles(scored[when]) for when in parts}, "change": _quantiles(change)},
        "share_of_users_better": {name: float(np.mean(change[name] > 0)) for name in ("C-AP", "O-AP")},
        "share_of_users_worse": {name: float(np.mean(change[name] < 0)) for name in ("C-AP", "O-AP")},
    }
    whole = {
        **summary,
        "user_ids": list(scores.users),
        "trained_on": scores.trained_on.tolist(),
        "scored_on": np.diff(scores.offsets).tolist(),
        **{when: _columns(scored[when]) for when in parts},
    }
    return whole, summary


def write_users(
    directory: Path,
    config: Config,
    module: ImageClassifier,
    task: LabelSetView,
    scored: MultiLabelScores,
) -> Tree:
    """Write ``per_user.json`` and ``plots/per_user.png`` of a model; the summary for ``results.json``.

    All workers call this, and share the fine-tuning; the first writes.

    Raises:
        ValueError: when no user has as many images as ``personal.min_images``.
    """
    from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

    store = task.split(SPLIT)
    values = _user_scores(scored, store.user_offsets)
    summary: Tree = {"users": len(store.user_ids), "quantiles": _quantiles(values)}
    whole: dict[str, Any] = {
        "split": SPLIT,
        "setting": config.setting,
        **summary,
        "user_ids": list(store.user_ids),
        "images": np.diff(store.user_offsets).tolist(),
        **_columns(values),
    }
    violins = {"all users": values["O-AP"]}
    if config.personal.num_epochs:
        whole["personal"], summary["personal"] = _personal_tree(
            config, personalise(module, store, personalisation(config))
        )
        for when in ("before", "after"):
            column = np.array(whole["personal"][when]["O-AP"], np.float64)
            violins[f"held-out images,\n{when} fine-tuning"] = column
    if not is_main():
        return summary
    write_json(directory / "per_user.json", whole)
    plots.per_user_violins(
        violins,
        f"{shown('O-AP')} of one user (%)",
        f"{config.setting}: {len(store.user_ids)} test users",
        directory / "plots" / "per_user.png",
    )
    return summary
