"""Which variables stay with users, what is read back of them, and how scores are spread over users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pfl_ext.algorithms.cohort_vectors import CohortVectors
from pfl_ext.algorithms.ditto import Ditto
from pfl_ext.algorithms.flat_variables import FlatVariables
from pfl_ext.algorithms.moon import Moon
from pfl_ext.algorithms.per_user import spread
from pfl_ext.algorithms.personal_parts import personal_names
from pfl_ext.algorithms.personalised import Personalised
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.tasks.single_label import SingleLabel


def classifier(arch: str, **config: Any) -> ImageClassifier:
    backbone = build_backbone(
        ModelConfig(arch=arch, input_size=32, **config), 5, torch.Generator().manual_seed(0)
    )
    return ImageClassifier(backbone, task=SingleLabel(), input_size=32)


def test_norms_are_found_by_their_type() -> None:
    """Those of ResNet's shortcuts too, whose name says nothing of a norm."""
    module = classifier("resnet18")
    names = personal_names(module, "norms")
    assert "backbone.layer2.0.downsample.1.weight" in names
    assert not any("conv" in name or "fc" in name for name in names)
    assert FlatVariables(module, names).length == 9600, "affine numbers of 4,800 channels"


def test_the_head_a_bottleneck_and_beginnings_of_names() -> None:
    assert personal_names(classifier("lenet"), "head") == ["backbone.fc3.weight", "backbone.fc3.bias"]
    both = personal_names(classifier("resnet18", bottleneck=4), "head")
    assert [name.removeprefix("backbone.") for name in both] == [
        "fc.0.weight",
        "fc.0.bias",
        "fc.1.weight",
        "fc.1.bias",
    ]
    module = classifier("lenet")
    assert personal_names(module, "fc3, backbone.conv1.b") == [
        "backbone.conv1.bias",
        "backbone.fc3.weight",
        "backbone.fc3.bias",
    ]
    assert personal_names(module, None) == []
    assert len(personal_names(module, "all")) == len(list(module.parameters()))


def test_only_what_is_trained_stays_with_users() -> None:
    module = classifier("resnet18", trained="head")
    assert personal_names(module, "all") == ["backbone.fc.weight", "backbone.fc.bias"]
    with pytest.raises(ValueError, match="no norm layer of this network is trained, so none can be personal"):
        personal_names(module, "norms")
    with pytest.raises(ValueError, match=r"personal is layer4, but no trained variable begins with 'layer4'"):
        personal_names(module, "layer4")


def test_users_who_never_took_part_have_the_first_vector_and_no_room(tmp_path: Path) -> None:
    module = classifier("lenet")
    layout = FlatVariables(module, personal_names(module, "fc3"))
    path, first = tmp_path / "personal.f32", torch.arange(float(layout.length))
    parts = CohortVectors(40_000, layout.length, path)
    parts.write(7, first + 1)
    parts.write(39_999, first + 2)
    parts.end()
    assert path.stat().st_size == 2 * 4 * layout.length
    kept = parts.tensors()
    parts.saved()
    again = CohortVectors(40_000, layout.length, path)
    again.load(kept)
    for vectors in (parts, again):
        assert vectors.read(3) is None
        for user, expected in ((39_999, first + 2), (7, first + 1)):
            torch.testing.assert_close(vectors.read(user), expected, rtol=0, atol=0)
    named = layout.named(first)
    torch.testing.assert_close(layout.flat({**named, "other": first}), first, rtol=0, atol=0)


def test_users_who_keep_nothing_have_no_file(tmp_path: Path) -> None:
    parts = CohortVectors(3, 0, tmp_path / "personal.f32")
    parts.write(1, torch.empty(0))
    parts.end()
    assert (parts.read(1), parts.tensors(), list(tmp_path.iterdir())) == (None, {}, [])


def test_the_spread_over_users() -> None:
    values = np.array([*range(21), np.nan], float)
    of_20 = spread(values, np.arange(22))
    assert of_20["n"] == 21
    assert of_20["mean"] == 10
    assert of_20["std"] == pytest.approx(np.sqrt((21**2 - 1) / 12), abs=1e-4)
    assert (of_20["lowest decile"], of_20["highest decile"]) == (1, 19), "three users each"
    assert spread(np.array([4.0, 2.0]), np.array([1, 1]))["lowest decile"] == 2, (
        "of few users it is the lowest one"
    )
    assert spread(np.array([np.nan]), np.array([1])) == {"n": 0}


def test_who_shares_less_than_all_keeps_parts() -> None:
    """So the server's model is nobody's, which tables mark; and Ditto's and MOON's is everybody's."""
    sends_nothing: Any = type("SendsNothing", (Personalised,), {"shared_names": classmethod(lambda *_: [])})
    assert [kind.keeps_parts(None) for kind in (sends_nothing, Ditto, Moon)] == [True, False, False]
