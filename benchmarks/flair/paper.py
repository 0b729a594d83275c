"""The FLAIR paper's numbers (Table 1, and the table beside Figure 4), and what can be held against them.

A run's config is said in terms of what is shipped: a setting, a scale, and what differs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.core.config.digests import experiment
from benchmarks.core.config.sections import LocalPrivacySection
from benchmarks.core.config.trees import Tree, as_word
from benchmarks.core.weights import from_torchvision
from benchmarks.flair.config import FLAIR, Config, parse
from pfl_ext.tasks.multi_label_scores import BINNED, COLUMNS

SCORES = dict.fromkeys(("val", "test"), (*COLUMNS, *BINNED.values()))
"""What the results of a run must hold to be reported."""
LOCAL = "LDP-"
"""How the rows of runs with local differential privacy begin."""
FLAIR_USERS = {"train": 41131, "val": 5141, "test": 5142}
FLAIR_IMAGES = {"train": 345879, "val": 39239, "test": 43960}


@cache
def _table() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "table1.json").read_text(encoding="utf-8")))


def settings() -> tuple[str, ...]:
    """The twelve rows of Table 1."""
    return tuple(_table()["rows"])


def row(setting: str, of_seeds: str = "mean") -> dict[str, float] | None:
    """The paper's test columns of one setting in percent, ``mean`` or ``std`` over five seeds; None if it has
    no such row."""
    found = _table()["rows"].get(setting)
    return dict(zip(COLUMNS, found[of_seeds])) if found else None


def per_class(setting: str) -> dict[str, float]:
    """The paper's AP of each coarse class in percent; empty for settings the paper does not give."""
    table = _table()["per_class_ap"]
    return dict(zip(table["classes"], table[setting])) if setting in table else {}


def is_flair(data: Tree) -> bool:
    """Whether these are facts of FLAIR itself: its users and images, not drawn ones."""
    counts = (data.get("users"), data.get("images"))
    return data.get("source") != "mini" and counts == (FLAIR_USERS, FLAIR_IMAGES)


def _fields_of(config: Config) -> Tree:
    """What seeds of one experiment share, without the weights, which a label has from ``results.json``."""
    fields = experiment(dataclasses.asdict(config), Config)
    return {k: v for k, v in fields.items() if k not in ("setting", "model.weights_sha256")}


def _default_options(config: Config) -> Tree:
    """The defaults of the options that what a config chooses declares itself, by dotted key."""
    found = {}
    for name in ("server", "federated", "compression", "aggregation", "attack"):
        section = getattr(config, name)
        for item in dataclasses.fields(section.chosen.options) if section.options else ():
            found[f"{name}.options.{item.name}"] = item.default
    return found


@cache
def _shipped(setting: str, scale: str | None, recipe: str | None) -> Tree | None:
    """The fields of a shipped setting at a scale; None where the recipe does not go with the setting."""
    words = [f"--config={setting.replace(LOCAL, 'fl-', 1).lower()}"]
    words += [f"--{key}={name}" for key, name in (("scale", scale), ("recipe", recipe)) if name is not None]
    if setting.startswith(LOCAL):
        words += ["--federated.weighting=users", f"--local_privacy.epsilon={LocalPrivacySection.epsilon}"]
    try:
        return _fields_of(parse(words).config)
    except ValueError:
        return None


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
        return tuple(text for text in self.differences if text != "privacy.noise=rounds_as_epochs")

    @property
    def reason(self) -> str:
        """Why this run cannot be compared with the paper's row, where differences are essential."""
        return f"config differs: {', '.join(self.essential)}"

    @property
    def label(self) -> str:
        """``FL-R-17, data.partition=iid``."""
        return ", ".join((self.setting, *self.differences))


def variant(config: Config) -> Variant:
    """The shortest description of a config in terms of what is shipped."""
    local = config.local_privacy is not None
    if config.setting.lower() not in FLAIR.settings or config.setting not in settings():
        unlike = ("local differential privacy", "its own config") if local else ("its own config",)
        return Variant(config.setting, None, unlike)
    setting = LOCAL + config.setting.split("-", 1)[1] if local else config.setting
    fields, defaults, candidates = _fields_of(config), _default_options(config), []
    for recipe, scale in itertools.product((None, "pfl"), (None, *FLAIR.scales)):
        base = _shipped(setting, scale, recipe)
        if base is None:
            continue
        shipped = {**defaults, **base}
        keys = [key for key in {**base, **fields} if shipped.get(key) != fields.get(key)]
        if "privacy" in fields and "privacy" not in base:  # none of its keys, where the row has them
            keys = ["privacy", *(key for key in keys if not key.startswith("privacy"))]
        differences = [] if recipe is None else [f"recipe={recipe}"]
        differences += [f"{key}={as_word(fields.get(key))}" for key in keys]
        candidates.append(Variant(setting, scale, tuple(differences)))
    return min(candidates, key=lambda candidate: len(candidate.differences))


def reasons_against(config: Config, results: Tree, data: Tree) -> Iterator[str]:
    """Why a run's numbers cannot be held against the paper's row of its setting; nothing where they can.

    Whoever asks only whether there is a reason has an answer at the first. What a config differs in is a late
    one, as it takes a while: all shipped settings are parsed for it.

    Args:
        config: the run's.
        results: its results.json.
        data: the facts of its data file; empty where they are not known.
    """
    if not data:
        released = config.privacy is not None and config.privacy.release == "public"
        why = "a public release does not describe the data" if released else "the data file cannot be opened"
        yield f"{why}, so it is not known whether it is FLAIR"
    elif not is_flair(data):
        yield "the data set is not FLAIR"
        labels = len(results["per_class_ap"])
        expected = 17 if config.data.taxonomy == "labels" else 1628
        if labels != expected:
            yield f"{labels:,} labels for {expected:,}"
    if config.local_privacy is not None:
        yield "local differential privacy, of which the paper has no row"
    described = variant(config)
    if described.scale is not None:
        yield f"scale {described.scale}"
    if described.essential:
        yield described.reason
    weights, network = results.get("weights"), FLAIR.default_config.model.arch
    origin = (weights.get("description") or weights["file"]) if weights else "not recorded"
    if config.model.pretrained and config.model.arch != network:
        yield f"another network, {config.model.arch} ({origin}), where the paper has {network}"
    elif config.model.pretrained and not from_torchvision(weights):
        yield f"weights are not torchvision's ImageNet ones ({origin})"
