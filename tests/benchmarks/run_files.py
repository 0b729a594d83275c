"""What a run leaves: the files of its directory, and what it says on stderr."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.core.config.trees import Tree
from pfl_ext import checkpoint


def results(directory: Path) -> Tree:
    """``results.json``."""
    return dict(json.loads((directory / "results.json").read_text()))


def lines(directory: Path) -> list[Tree]:
    """``metrics.jsonl`` without the time of each line."""
    read = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in read]


def timeless(directory: Path) -> list[Tree]:
    """`lines` without any time of a clock; those of `pfl_ext.devices` are computed, and stay."""
    return [
        {k: v for k, v in line.items() if "seconds" not in k or "virtual" in k} for line in lines(directory)
    ]


def last_checkpoint(directory: Path) -> dict[str, Tensor]:
    """The tensors of the last checkpoint."""
    return checkpoint.load(directory / "checkpoint" / "last.safetensors")[0]


def saved(directory: Path) -> dict[str, Tensor]:
    """The tensors of ``model.safetensors``."""
    return dict(load_file(directory / "model.safetensors"))


def weights(directory: Path) -> np.ndarray:
    """All that ``model.safetensors`` holds, as one vector."""
    return np.concatenate([tensor.numpy().ravel() for _, tensor in sorted(saved(directory).items())])


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr, but for the one that a run prints where there is no compiler."""
    written = capsys.readouterr().err.splitlines()
    return [line for line in written if line and not line.startswith("convolutions are torch's own")]


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a mistake leaves on stderr."""
    written = said(capsys)
    assert len(written) == 1, written
    assert written[0].startswith("error: ")
    return written[0]
