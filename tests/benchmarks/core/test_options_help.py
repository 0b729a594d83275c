"""The help of a training command lists what things chosen by name can be given."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.core.config.sections import FederatedConfig
from benchmarks.flair.config import FLAIR
from pfl_ext.algorithms.algorithm import ALGORITHMS


def test_help_lists_the_options_of_everything_that_is_chosen_by_name() -> None:
    text = " ".join(FLAIR.help("", "train").split())
    for name in ALGORITHMS.names():
        kind: Any = ALGORITHMS[name].options
        for item in dataclasses.fields(kind):
            described = kind.__pydantic_fields__[item.name].description
            assert described, (name, item.name)
            assert " ".join(described.split()) in text, (name, item.name)
            own = "" if item.name in FederatedConfig.__dataclass_fields__ else "options."
            assert f"--federated.{own}{item.name} " in text, (name, item.name)
    for key in ("compression.options.share", "attack.options.scale", "aggregation.options.tolerated"):
        assert f"--{key} float" in text
    assert "where federated.algorithm is fedma:" in text
    assert "{ring,torus,erdos_renyi,exponential,star,complete}" in text
    assert "(default: None)" not in text
