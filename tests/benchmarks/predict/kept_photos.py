"""What predicted masks must not replace."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.predict.__main__ import main
from dataset.cli import run


def check_that_masks_replace_nothing(
    directory: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither photos, also with --overwrite and by a link, nor other files without --overwrite."""
    photo, link, masks = photos / "one.png", photos.parent / "link", photos.parent / "masks"
    Image.new("RGB", (8, 8), "blue").save(photo)
    before, words = photo.read_bytes(), [str(directory), "--images", str(photos)]
    link.symlink_to(photos)
    for folder in (photos, link):
        for more in ([], ["--overwrite"]):
            assert run(main, [*words, "--output", str(folder), *more]) == 2
            line = capsys.readouterr().err
            assert f"the mask {folder / 'one.png'} would replace a file that this command reads: give" in line
            assert line.count("\n") == 1
    assert photo.read_bytes() == before
    assert {path.name for path in photos.iterdir()} == {"one.png", "wide.jpg"}
    masks.mkdir()
    (masks / "wide.png").write_text("another's")
    assert run(main, [*words, "--output", str(masks)]) == 2
    assert f"{masks / 'wide.png'} already exists; add --overwrite to replace it" in capsys.readouterr().err
    assert [path.read_text() for path in masks.iterdir()] == ["another's"], "nothing was written"
    assert run(main, [*words, "--output", str(masks), "--overwrite"]) == 0
    assert run(main, [*words, "--output", str(masks)]) == 2
    assert "one.png already exists (and 1 more); add" in capsys.readouterr().err
