"""Class numbers have 16 bits in a file: more classes are refused, not counted from 0 again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataset.preprocess import Options, preprocess
from dataset.store.annotations import MAX_LABELS, Boxes, Kind, LabelMatrix, OneClass, check_annotation
from dataset.store.columns import build_index, schema
from dataset.store.index import DatasetIndex
from tests.dataset.store.test_annotations import source

MANY = [f"{k:05d}" for k in range(MAX_LABELS + 1)]
REFUSED = "found has 65,537 classes, but a file can have at most 65,536: check that these are classes"
VALUES: dict[Kind, Any] = {
    "class": lambda name: name,
    "label set": lambda name: [name],
    "boxes": lambda name: [{"name": name, "corners": [0, 0, 1, 1]}],
}


def table(kind: Kind, names: list[str]) -> pa.Table:
    ids = [f"i{name}" for name in names]
    columns = [["u"] * len(names), ids, ["train"] * len(names), [VALUES[kind](name) for name in names]]
    return pa.table(columns, schema({"found": kind}))


def index_of(kind: Kind, names: list[str], vocabulary: list[str] | None = None) -> DatasetIndex:
    known = {} if vocabulary is None else {"found": vocabulary}
    keep = np.ones(len(names), bool)
    return build_index(table(kind, names), keep, grouped=True, vocabulary=known, provenance={})[0]


@pytest.mark.parametrize("kind", VALUES)
def test_the_last_class_keeps_its_number_and_one_more_is_refused(kind: Kind) -> None:
    found = index_of(kind, MANY[-2:-1], MANY[:-1]).splits["train"].annotations["found"]
    numbers = found.classes if isinstance(found, Boxes) else found.indices  # type: ignore[union-attr]
    assert numbers.tolist() == [MAX_LABELS - 1]
    with pytest.raises(ValueError, match=REFUSED):
        index_of(kind, MANY[-1:], MANY)


def test_classes_that_are_found_are_counted_too() -> None:
    with pytest.raises(ValueError, match=REFUSED):
        index_of("class", MANY)


def test_a_long_vocabulary_is_refused_before_any_image_is_read(tmp_path: Path) -> None:
    """There are no images, which would be the next error."""
    images = source(tmp_path, table("class", MANY[-1:]), {"found": "class"})
    with pytest.raises(ValueError, match=REFUSED):
        preprocess(images, Options(tmp_path / "f.hdf5", vocabulary={"found": MANY}))
    assert not list(tmp_path.iterdir())


def test_columns_in_memory_are_refused_too() -> None:
    with pytest.raises(ValueError, match="has 65,537 classes"):
        OneClass.of(np.array([MAX_LABELS]), MAX_LABELS + 1)
    with pytest.raises(ValueError, match="has 65,537 classes"):
        LabelMatrix.from_pairs(np.zeros(1, int), np.array([MAX_LABELS]), 1, MAX_LABELS + 1)
    of_another_program = LabelMatrix(np.array([0, 1]), np.zeros(1, np.uint16), MAX_LABELS + 1)
    with pytest.raises(ValueError, match=REFUSED):
        check_annotation("found", of_another_program, 1)
