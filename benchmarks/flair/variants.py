"""A run's config, said in terms of what is shipped: a setting, a scale, and what differs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.core.config.digests import experiment
from benchmarks.core.config.sections import LocalPrivacySection
from benchmarks.core.config.trees import Tree
from benchmarks.flair import paper
from benchmarks.flair.config import FLAIR, Config, parse
from pfl_ext.tasks.multi_label_scores import BINNED, COLUMNS

SCORES = dict.fromkeys(("val", "test"), (*COLUMNS, *BINNED.values()))
"""What the results of a run must hold to be reported."""
LOCAL = "LDP-"
"""How the rows of runs with local differential privacy begin."""
FLAIR_USERS = {"train": 41131, "val": 5141, "test": 5142}
FLAIR_IMAGES = {"train": 345879, "val": 39239, "test": 43960}


def is_flair(data: Tree) -> bool:
    """Whether these are facts of FLAIR itself: its users and images, not drawn ones."""
    return (
        data.get("source") != "mini"
        and data.get("users") == FLAIR_USERS
        and data.get("images") == FLAIR_IMAGES
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
        """Why this run cannot be compared with the paper's row, where differences are essential."""
        return f"config differs: {', '.join(self.essential)}"

    @property
    def label(self) -> str:
        """``FL-R-17, data.partition=iid``."""
        return ", ".join((self.setting, *self.differences))


def variant(config: Config) -> Variant:
    """The shortest description of a config in terms of what is shipped."""
    local = config.local_privacy is not None
    if config.setting.lower() not in FLAIR.settings or config.setting not in paper.settings():
        return Variant(
            config.setting, None, (*(["local differential privacy"] if local else []), "its own config")
        )
    setting = LOCAL + config.setting.split("-", 1)[1] if local else config.setting
    fields, best = fields_of(config), None
    for recipe in (None, "pfl"):
        for scale in (None, *FLAIR.scales):
            try:
                base = _shipped(setting, scale, recipe)
            except ValueError:
                continue  # the recipe does not go with the setting
            keys = [key for key in {**base, **fields} if base.get(key) != fields.get(key)]
            if "privacy" in fields and "privacy" not in base:  # none of its keys, where the row has them
                keys = ["privacy", *(key for key in keys if not key.startswith("privacy"))]
            differences = [f"{key}={_word(fields.get(key))}" for key in keys]
            candidate = Variant(setting, scale, (*([f"recipe={recipe}"] if recipe else []), *differences))
            if best is None or len(candidate.differences) < len(best.differences):
                best = candidate
    assert best is not None
    return best


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
