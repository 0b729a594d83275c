"""Which of a user's own files a run is computed by, however they register what they add."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fedcv.segmentation.config import SEGMENTATION
from benchmarks.flair.config import parse
from dataset.partitions import drawn as partitions
from pfl_ext.algorithms.optimizers import SERVER_OPTIMIZERS
from pfl_ext.models.small import NETWORKS

NETS = """
from functools import partial
from torch import nn
from torchvision.models import resnet18
from dataset.partitions.drawn import drawers, drawn
from pfl_ext.models.decoders import Architecture
from pfl_ext.models.segmentation import UNet
from pfl_ext.algorithms.optimizers import SERVER_OPTIMIZERS
from pfl_ext.models.small import NETWORKS
from consts_of_mine import FACTOR

class MyUNet(UNet):
    pass

def add(name, thing):
    NETWORKS.add(name, thing)

add("unet_of_mine", Architecture(MyUNet, "efficientnet_lite0", "pixels", widened=True))
add("stock_of_mine", partial(resnet18))
SERVER_OPTIMIZERS.add("steps_of_mine", SERVER_OPTIMIZERS["sgd"])
drawn("dealt-of-mine", numbered=False)(partial(drawers()["iid"]))
"""
MODULES = ("nets_of_mine", "consts_of_mine")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """A file that registers objects of stock classes, and one of another folder that it imports."""
    for registry in (NETWORKS, SERVER_OPTIMIZERS):
        registry.names()  # complete
        monkeypatch.setattr(registry, "_things", dict(registry._things))
    partitions.drawers()
    for name in ("_DRAWERS", "_WITHOUT_NUMBER"):
        monkeypatch.setattr(partitions, name, getattr(partitions, name).copy())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    found = [tmp_path / "nets" / "nets_of_mine.py", tmp_path / "consts_of_mine.py"]
    found[0].parent.mkdir()
    for path, text in zip(found, (NETS, "FACTOR = 1\n")):
        path.write_text(text)
    monkeypatch.setenv("FL_IMPORT", "nets/nets_of_mine.py,consts_of_mine")
    yield found
    for name in MODULES:
        sys.modules.pop(name, None)


CHOICES = {
    "network": "--model.arch=stock_of_mine",
    "partition": "--data.partition=dealt-of-mine-clients-3-seed-0",
    "optimiser": "--server.optimizer=steps_of_mine",
}


@pytest.mark.parametrize("choice", CHOICES)
def test_what_a_file_registers_counts_whoever_defined_it(choice: str, files: list[Path]) -> None:
    assert parse(["--model.arch=lenet"]).config.own_code is None
    before = parse([CHOICES[choice]]).config.own_code
    assert before is not None
    for path in files:
        text = path.read_text()
        path.write_text(f"{text}# edited\n")
        assert parse([CHOICES[choice]]).config.own_code != before, path
        path.write_text(text)


def test_a_network_for_masks_of_own_parts_counts(files: list[Path]) -> None:
    words = ["--config=camvid-fl", "--model.arch=unet_of_mine"]
    before = SEGMENTATION.parse(words).config.own_code
    assert before is not None
    files[0].write_text(f"{NETS}# edited\n")
    assert SEGMENTATION.parse(words).config.own_code != before
