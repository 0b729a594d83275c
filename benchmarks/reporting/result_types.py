"""The types of the parts of ``results.json`` that reports read, so that an edited file is found once.

A part may be missing, as in runs of earlier versions. Parts that are not named here may be anything.
"""

from __future__ import annotations

from typing import Any

from pydantic import StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from benchmarks.core.config.trees import Tree

Scores = dict[str, StrictFloat | None]


class Data(TypedDict, total=False):
    """Facts of the data file."""

    source: StrictStr | None
    content_sha256: StrictStr | None
    users: dict[str, StrictInt]
    images: dict[str, StrictInt]
    category_ids: list[StrictInt]


class Weights(TypedDict, total=False):
    """What the run began with."""

    file: StrictStr
    sha256: StrictStr | None
    description: StrictStr | None
    experiment_sha256: StrictStr | None


class Traffic(TypedDict):
    """Bytes of one client in one round."""

    down: StrictFloat
    up: StrictFloat


class PerUser(TypedDict, total=False):
    """Scores of single users."""

    quantiles: dict[str, Scores]


class DeclaredKinds(TypedDict, total=False):
    """What the task declares of its scores."""

    lower_is_better: list[StrictStr]
    units: dict[str, StrictStr]


class Results(TypedDict, total=False):
    """The whole file."""

    dataset: StrictStr
    rounds: StrictInt
    best_step: StrictInt | None
    score_kinds: DeclaredKinds
    test: dict[str, StrictFloat]
    val: dict[str, StrictFloat] | None
    last: dict[str, dict[str, StrictFloat]] | None
    data: Data | None
    partition: dict[str, Any]
    weights: Weights | None
    own_code: dict[str, StrictStr]
    parameters: StrictInt
    trainable_parameters: StrictInt
    wall_clock_s: StrictFloat
    traffic: Traffic | None
    prevalence: dict[str, StrictFloat]
    per_user: PerUser
    per_class_ap: Scores
    per_class_ap50: Scores
    per_class_accuracy: Scores
    confusion: dict[str, list[StrictInt]]
    per_class_iou: Scores
    per_class_dice: Scores
    per_class_sensitivity: Scores
    per_class_specificity: Scores
    model_sha256: StrictStr


_RESULTS = TypeAdapter(Results)


def check_types(results: Tree) -> None:
    """Refuse results of which a part has another type than what a run writes.

    Raises:
        ValueError: one line that names the first such part and its value.
    """
    try:
        _RESULTS.validate_python(results)
    except ValidationError as faults:
        first = faults.errors()[0]
        name, why = " ".join(map(str, first["loc"])), first["msg"]
        raise ValueError(
            f"results.json has {name} = {repr(first['input'])[:80]}: {why[0].lower()}{why[1:]}"
        ) from None
