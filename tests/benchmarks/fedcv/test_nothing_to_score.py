"""A split in which nothing can be learnt or scored is refused; it would have an mIoU or an mAP of 0."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.fedcv.detection.train import main as detection
from benchmarks.fedcv.segmentation.train import main as segmentation
from dataset.flair.mini import write_mini
from dataset.flair.mini_outlines import boxed_index, masked_index
from dataset.store.annotations import CROWD, VOID, Boxes, Masks, encoded_mask
from tests.benchmarks.conftest import TINY
from tests.benchmarks.sparing import run_into

SPEC = replace(
    TINY, image_size=16, train_users=4, val_users=2, test_users=2, coarse_labels=1, num_fine_labels=17
)


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("kind", ["masks", "boxes"])
def test_a_split_without_truth_is_refused(
    kind: str, split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.hdf5"
    index = masked_index(SPEC) if kind == "masks" else boxed_index(SPEC)
    annotations = dict(index.splits[split].annotations)
    for name, found in annotations.items():
        if isinstance(found, Masks):
            void = io.BytesIO()
            Image.fromarray(np.full((16, 16), VOID, np.uint8)).save(void, "PNG")
            annotations[name] = Masks.of([void.getvalue()] * len(found), found.num_labels)
        if isinstance(found, Boxes):
            found.flags[:] = CROWD
    splits = {**index.splits, split: replace(index.splits[split], annotations=annotations)}
    write_mini(path, SPEC, index=replace(index, splits=splits))
    main, truth = (
        (segmentation, "pixel with a class in mask")
        if kind == "masks"
        else (detection, "box of a single object in objects")
    )
    run_into(
        main,
        tmp_path / "run",
        f"--data_path={path}",
        "--data.image_size=16",
        "--model.input_size=16",
        "--data.val_share=0",
        code=2,
    )
    assert f"error: {split} of {path} has no {truth}, so nothing can be learnt" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_masks_of_one_class_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As files have them that were made of masks with 0 and 255; such a run scored 100 %."""
    path, index = tmp_path / "data.hdf5", masked_index(SPEC)
    mask = np.zeros((16, 16), np.uint8)
    mask[2:5] = VOID
    png = encoded_mask(mask)
    annotations = {
        name: Masks.of([png] * len(found), found.num_labels) if isinstance(found, Masks) else found
        for name, found in index.splits["train"].annotations.items()
    }
    splits = {**index.splits, "train": replace(index.splits["train"], annotations=annotations)}
    write_mini(path, SPEC, index=replace(index, splits=splits))
    words = f"--data_path={path}", "--data.image_size=16", "--model.input_size=16"
    run_into(segmentation, tmp_path / "run", *words, code=2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"error: all pixels of train of {path} that have a class are background, so nothing can" in line
