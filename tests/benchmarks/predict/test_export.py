"""Models as files for plain PyTorch: what they say is what the run's model says."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.fedcv.detection.train import main as detect
from benchmarks.fedcv.segmentation.train import main as segment
from benchmarks.predict import export, trained
from benchmarks.predict.export import exported, main
from dataset.cli import run
from dataset.flair.mini_outlines import write_boxed, write_masked
from tests.benchmarks.conftest import train_into
from tests.benchmarks.predict.test_predict import OF_PLACES, SPEC, tiny
from tests.benchmarks.run_files import error_line, results
from tests.benchmarks.sparing import sparingly

__all__ = ["tiny"]  # networks of a few parameters
PLAIN = """
import json, sys, numpy, torch
more = {"about.json": ""}
model = torch.export.load(sys.argv[1], extra_files=more).module()
with torch.no_grad():
    numpy.save(sys.argv[3], model(torch.from_numpy(numpy.load(sys.argv[2]))).numpy())
assert not {"benchmarks", "pfl", "pfl_ext", "dataset"} & set(sys.modules)
print(more["about.json"] if isinstance(more["about.json"], str) else more["about.json"].decode())
"""


def images(number: int, side: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, side, side, 3), np.uint8)


def test_plain_pytorch_runs_it_without_this_project(
    mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A centre crop, labels, and a batch of another size than the one that it was traced with."""
    directory = train_into(tmp_path / "run", mini_file, "--federated.num_rounds=1")
    output = tmp_path / "model.pt2"
    assert run(main, [str(directory), "--output", str(output)]) == 0
    assert "17 classes, images of 20 pixels" in capsys.readouterr().out
    np.save(tmp_path / "in.npy", images(5, 20))
    command = [
        sys.executable,
        "-I",
        "-c",
        PLAIN,
        *map(str, (output, tmp_path / "in.npy", tmp_path / "out.npy")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    about, model = json.loads(done.stdout), trained(directory)
    assert about["classes"] == results(directory)["classes"] == list(model.classes)
    assert about["model_sha256"] == results(directory)["model_sha256"]
    wanted = model.predict(torch.from_numpy(images(5, 20)))
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "out.npy")), wanted)
    assert run(main, [str(directory), "--output", str(output)]) == 2
    assert "model.pt2 already exists; add --overwrite to replace it" in error_line(capsys)
    assert run(main, [str(directory), "--output", str(tmp_path / "model.onnx")]) == 2
    assert "torch.export's files are named .pt2" in error_line(capsys)
    monkeypatch.setattr(export, "trained", lambda _: (tmp_path / "late.pt2").write_bytes(b"") or model)
    assert run(main, [str(directory), "--output", str(tmp_path / "late.pt2")]) == 2
    assert "late.pt2 already exists; add --overwrite" in error_line(capsys)  # meanwhile
    assert not (tmp_path / "late.pt2").stat().st_size
    assert not list(tmp_path.glob("*.partial"))


def test_masks_are_exported_and_boxes_refused(tmp_path: Path) -> None:
    for name, write, train, more in (
        ("masks", write_masked, segment, []),
        ("boxes", write_boxed, detect, ["--model.groups=2", "--data.val_share=0"]),
    ):
        write(tmp_path / f"{name}.hdf5", SPEC)
        words = [f"--data_path={tmp_path / name}.hdf5", f"--run_dir={tmp_path / name}"]
        with sparingly(False):
            assert run(train, [*words, f"--model.arch=tiny_{name}", *OF_PLACES, *more]) == 0
    model = trained(tmp_path / "masks")
    program = torch.export.load(io.BytesIO(exported(model))).module()
    drawn = torch.from_numpy(images(2, 16))
    assert torch.equal(program(drawn), model.predict(drawn))
    with pytest.raises(ValueError, match=r"boxes finds boxes, which torch\.export cannot express"):
        exported(trained(tmp_path / "boxes"))
