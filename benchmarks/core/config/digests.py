"""What tells one config from another: its content in a fixed form, and the SHA-256 of that."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
from collections.abc import Mapping
from typing import Any

from benchmarks.core.config.older_runs import OLD_WORDS, YOUNG_SECTIONS, YOUNGER
from benchmarks.core.config.sections import REPETITION, TrainingConfig
from benchmarks.core.config.trees import Tree, dotted, leaves, put


def config_tree(config: TrainingConfig) -> Tree:
    """A config as ``config.yaml`` holds it: plain values only.

    A field that is younger than the first runs is left out where it has no effect, and a value that has
    another name today keeps its first one, so that the digests of such configs stay what they were.
    """
    tree: Tree = json.loads(json.dumps(dataclasses.asdict(config), allow_nan=False))
    if not config.model.pretrained:
        del tree["model"]["weights_sha256"]
    if config.model.trained != "lora":
        del tree["model"]["lora_targets"]
    for section in ("federated", "server"):
        if tree[section]["options"] is None:
            del tree[section]["options"]
    flat = dotted(tree)
    for key, neutral in YOUNGER.items():
        if key in flat and flat[key] == neutral:
            *sections, name = key.split(".")
            del functools.reduce(operator.getitem, sections, tree)[name]
    for section in YOUNG_SECTIONS:
        if not tree[section]:
            del tree[section]
    flat = dotted(tree)
    for key, (old, new) in OLD_WORDS.items():
        if flat.get(key) == new:
            put(tree, key, old)
    return tree


def tree_digest(tree: Mapping[str, Any]) -> str:
    """SHA-256 of the content of a ``config.yaml``, or of another tree, in a fixed form."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, allow_nan=False).encode()).hexdigest()


def digest(config: TrainingConfig) -> str:
    """`tree_digest` of a resolved config."""
    return tree_digest(config_tree(config))


def experiment(tree: Mapping[str, Any], kind: type[TrainingConfig]) -> Tree:
    """What runs that differ only in their seed have in common: every field of a resolved config by its dotted
    key, without those that their section marks as `REPETITION`.
    """
    apart = {leaf.key for leaf in leaves(kind) if leaf.metadata == REPETITION}
    return {key: value for key, value in dotted(tree).items() if key not in apart}


def experiment_digest(tree: Mapping[str, Any], kind: type[TrainingConfig]) -> str:
    """SHA-256 of `experiment` in a fixed form."""
    return tree_digest(experiment(tree, kind))


def short_digest(config: TrainingConfig) -> str:
    """What ``{digest}`` in ``--run_dir`` stands for: a name of a directory that no other config shares."""
    return digest(config)[:12]
