"""Whether there is room for a preprocessing, on the disk of the output and on that of the downloads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dataset import preprocess
from dataset.flair.sources import local
from dataset.journal import disk_of
from dataset.preprocess import Options, check_disk
from tests.dataset.drawn import records, write_parquet

OUTPUT, DOWNLOAD = 5_000, 8_000
"""Bytes that are needed."""


@pytest.mark.parametrize(
    "apart, room, there, refusal",
    [
        (True, OUTPUT, DOWNLOAD, None),
        (True, OUTPUT - 1, DOWNLOAD, "choose another disk"),
        (True, OUTPUT, DOWNLOAD - 1, "choose another --download_folder"),
        (False, OUTPUT + DOWNLOAD, 0, None),
        (False, OUTPUT + DOWNLOAD - 1, 0, "GB for the download and"),
    ],
)
def test_each_disk_needs_room_for_what_comes_onto_it(
    apart: bool, room: int, there: int, refusal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = tmp_path / "downloads" / "not yet there"

    def is_there(folder: Path) -> bool:
        return apart and folder == downloads

    monkeypatch.setattr(preprocess, "disk_of", is_there)
    monkeypatch.setattr(preprocess, "free", lambda folder: there if is_there(folder) else room)
    source = local(write_parquet(tmp_path / "flair", records(1)))
    source = replace(source, image_bytes=OUTPUT, download_bytes=DOWNLOAD)
    options = Options(tmp_path / "f.hdf5", "jpeg")
    if refusal is None:
        check_disk(source, options, downloads)
        return
    with pytest.raises(OSError, match=refusal):
        check_disk(source, options, downloads)


def test_a_folder_that_is_not_there_yet_lies_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    assert disk_of(tmp_path / "a" / "b") == tmp_path.stat().st_dev
