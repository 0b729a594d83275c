"""Somebody who works with CIFAR never reads the name of another data set."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest

from dataset.cifar10 import preprocess
from dataset.cifar10.download_preprocess import CIFAR10
from dataset.cli import run
from dataset.partitions.__main__ import main as statistics
from dataset.store.hdf5 import DataFile
from dataset.store.validate import main as describe
from dataset.store.views import LabelSetView, SingleLabelView
from tests.dataset.cifar10.made_cifar import write_parquet


def test_no_command_and_no_error_of_cifar_says_flair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, said = tmp_path / "f.hdf5", []
    make = partial(preprocess.main, CIFAR10)
    source = tmp_path / "source"
    write_parquet(CIFAR10, source)
    good = ["--output_file", str(output), "--source", str(source), "--splits", "none"]
    few = ["--clients", "2", "--images_per_client", "5", "--dirichlet_total", "1"]
    with pytest.raises(SystemExit):
        run(make, ["--help"])
    calls: list[tuple[int, list[str]]] = [
        (2, []),
        (2, ["--output_file", str(tmp_path)]),
        (2, ["--output_file", str(output), "--source", str(tmp_path / "nowhere")]),
        (2, [*good, "--dirichlet_total", "x"]),
        (0, [*good, *few]),
        (2, good),
    ]
    for code, argv in calls:
        assert run(make, argv) == code, argv
    for command in (describe, statistics):
        assert run(command, [str(output)]) == 0
        assert run(command, [str(tmp_path / "nowhere")]) == 2
    with DataFile(output) as file:
        for wrong in (
            lambda: SingleLabelView(file, "nobody"),
            lambda: SingleLabelView(file, taxonomy="fine"),
            lambda: LabelSetView(file, binary_label="cloud").split("val"),
            lambda: file.split("val"),
        ):
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                wrong()
            said.append(str(caught.value))
    for damage in ("images", "user_offsets", "annotations/labels/classes", "image_ids"):
        with h5py.File(output, "r+") as file:
            data = file[f"train/{damage}"]
            data[...] = np.roll(data[...], 1, axis=0)
        assert run(describe, [str(output)]) == 2
    output.write_bytes(output.read_bytes()[:5000])
    assert run(describe, [str(output)]) == 2
    output.write_bytes(b"no HDF5")
    assert run(describe, [str(output)]) == 2
    printed = capsys.readouterr()
    said += [printed.out, printed.err]
    assert len(printed.err.splitlines()) > 12
    assert "flair" not in "\n".join(said).replace(str(tmp_path), "").lower()


def test_a_file_of_one_class_each_does_not_say_flair(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "f.hdf5"
    write_parquet(CIFAR10, source)
    argv = ["--output_file", str(output), "--source", str(source), "--splits", "none"]
    assert run(partial(preprocess.main, CIFAR10), argv) == 0
    assert b"flair" not in output.read_bytes().lower()
    with h5py.File(output) as file:
        assert list(file["train/annotations"]) == ["labels"]
