"""What is said of a file that is sound."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataset.cli import run
from dataset.flair.download_preprocess import main as preprocess
from dataset.store import validate as validation
from dataset.store.index import TAXONOMIES
from dataset.store.validate import _label_lines, main
from tests.dataset.drawn import records, write_parquet
from tests.dataset.store.test_hdf5 import partitioned, write


def test_a_sound_file_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(main, [str(write(tmp_path / "f.hdf5", "jpeg", splits=partitioned()))]) == 0
    text = capsys.readouterr().out
    assert "train: 3 users, 7 images (per user: median 2, mean 2.33, max 4)" in text
    assert "partition geo-100: 3 users, 5 images (per user: median 2, mean 1.67, max 2)" in text
    assert "1.000 labels/image" in text
    assert "jpeg, grouped by user, valid" in text
    assert "source: drawn" in text


def test_what_comes_after_equal_labels_is_described_too() -> None:
    def classes(*counts: int) -> SimpleNamespace:
        return SimpleNamespace(kind="one class", counts=lambda: np.array(counts))

    annotations = {"a": classes(3, 4), "b": classes(3, 4), "c": classes(5, 2)}
    mappings = {key: {"cat": 0, "dog": 1} for key in annotations}
    reader, split = SimpleNamespace(label_mappings=mappings), SimpleNamespace(annotations=annotations)
    file: Any = SimpleNamespace(reader=reader, splits=["train"], split=lambda name: split)
    assert _label_lines(file) == [
        *("a: 2, with images in train", "  dog: 4", "  cat: 3", "b: the same 2"),
        *("c: 2, with images in train", "  cat: 5", "  dog: 2"),
    ]


def test_a_description_names_the_labels_and_counts_their_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each label of each taxonomy, the most frequent first; of many, the first ones and the rest together."""
    rows = records(60)
    folder, path = write_parquet(tmp_path / "in", rows), tmp_path / "f.hdf5"
    assert run(preprocess, [f"--source={folder}", f"--output_file={path}"]) == 0

    def counts(taxonomy: str) -> list[list[str]]:
        """Name and counts as they were printed."""
        capsys.readouterr()
        assert run(main, [str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(f"{taxonomy}: "))
        assert lines[start].endswith("with images in train, val, test")
        return [line.strip().split(": ") for line in itertools.takewhile(is_label, lines[start + 1 :])]

    def is_label(line: str) -> bool:
        return line.startswith("  ")

    def expected(taxonomy: str, label: str) -> str:
        here = [one.partition for one in rows if label in getattr(one, taxonomy)]
        return ", ".join(str(here.count(split)) for split in ("train", "val", "test"))

    for taxonomy in TAXONOMIES:
        printed = counts(taxonomy)
        names = {label for one in rows for label in getattr(one, taxonomy)}
        assert {name for name, _ in printed} == names
        assert all(numbers == expected(taxonomy, name) for name, numbers in printed)
        totals = [sum(map(int, numbers.split(", "))) for _, numbers in printed]
        assert totals == sorted(totals, reverse=True)
    monkeypatch.setattr(validation, "MOST_LABELS", 4)
    fine = counts("fine_grained_labels")
    assert [name for name, _ in fine[4:]] == ["9 more, together"]
    held = np.array([[int(n) for n in numbers.split(", ")] for _, numbers in fine])
    np.testing.assert_array_equal(
        held.sum(0),
        [
            sum(len(set(one.fine_grained_labels)) for one in rows if one.partition == split)
            for split in ("train", "val", "test")
        ],
    )
