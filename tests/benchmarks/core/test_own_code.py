"""Which of a user's own files a run is computed by, however they register what they add."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from benchmarks.compare.reading import read_any
from benchmarks.core.config.digests import config_tree
from benchmarks.core.own_code import own_code
from benchmarks.core.run_directory import run_differences
from benchmarks.fedcv.segmentation.config import SEGMENTATION
from benchmarks.flair.config import parse
from benchmarks.flair.train import Flair
from dataset.files import own_modules
from dataset.partitions import drawn as partitions
from pfl_ext.algorithms.optimizers import SERVER_OPTIMIZERS
from pfl_ext.models.small import NETWORKS
from tests.benchmarks.conftest import train_into
from tests.benchmarks.core.test_features import EACH_ROUND, HEAD, SINGLE_STEPS, folders
from tests.benchmarks.core.test_features import own_file as own_file
from tests.benchmarks.made_runs import make_run
from tests.benchmarks.run_files import saved
from tests.closeness import assert_close_as_vector

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


def test_what_only_a_function_imports_counts_before_it_is_imported(files: list[Path]) -> None:
    files[0].write_text(f"{NETS}\ndef late():\n    import later_of_mine, package_of_mine.part\n")
    late = [files[0].parent / name for name in ("later_of_mine.py", "package_of_mine/part.py")]
    late[1].parent.mkdir()
    for path in late:
        path.write_text("")
    before = parse([CHOICES["network"]]).config.own_code
    for path in late:
        path.write_text("# edited\n")
        assert parse([CHOICES["network"]]).config.own_code != before, path
        path.write_text("")
    assert parse([CHOICES["network"]]).config.own_code == before
    assert not {"later_of_mine", "package_of_mine"} & sys.modules.keys()


def test_a_network_for_masks_of_own_parts_counts(files: list[Path]) -> None:
    words = ["--config=camvid-fl", "--model.arch=unet_of_mine"]
    before = SEGMENTATION.parse(words).config.own_code
    assert before is not None
    files[0].write_text(f"{NETS}# edited\n")
    assert SEGMENTATION.parse(words).config.own_code != before


FROZEN = """
from torch import Tensor, nn
from pfl_ext.models.small import NETWORKS

class Net(nn.Module):
    def __init__(self, labels):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, labels)

    def forward(self, x):
        return self.last(self.first(x).relu().mean((2, 3)))

@NETWORKS.register("frozen_of_mine")
def frozen(labels: int, _: int) -> nn.Module:
    return Net(labels)
"""


def test_features_of_an_edited_network_are_computed_again(
    files: list[Path], own_file: Path, tmp_path: Path
) -> None:
    """Its weights, layers and name are what they were, only what it computes is not."""
    argv, found = (*HEAD, "--model.arch=frozen_of_mine", "--federated.num_rounds=1"), list[Path]()
    for number, text in enumerate((FROZEN, FROZEN.replace("relu", "sin"))):
        files[0].write_text(text)
        sys.modules.pop(MODULES[0], None)
        NETWORKS._things.pop("frozen_of_mine", None)
        importlib.invalidate_caches()
        shutil.rmtree(files[0].parent / "__pycache__", ignore_errors=True)
        found = [
            train_into(tmp_path / f"{name}{number}", own_file, *argv, *more)
            for name, more in (("kept", ()), ("each", (EACH_ROUND,)))
        ]
        assert_close_as_vector(saved(found[0]), saved(found[1]), SINGLE_STEPS)
    assert len(folders(own_file)) == 2


def test_an_edited_benchmark_of_ones_own_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task and its images are no choice by name; by its name it is known as a command, too."""
    folder = tmp_path / "ideas"
    for name in ("rotation.py", "rotation.yaml"):
        folder.mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name(name), folder / name)
    (folder / "angles_of_mine.py").write_text("MOST = 45\n")
    text = (folder / "rotation.py").read_text()
    (folder / "rotation.py").write_text(f"import angles_of_mine\n{text.partition('import sys')[2]}")
    monkeypatch.syspath_prepend(str(folder))
    benchmark = importlib.import_module("rotation").Rotation.benchmark
    found = [benchmark.parse([]).config.own_code]
    for name in ("rotation.py", "angles_of_mine.py"):
        with (folder / name).open("a") as file:
            file.write("# edited\n")
        found.append(benchmark.parse([]).config.own_code)
    assert None not in found
    assert len(set(found)) == 3
    module = sys.modules.pop("rotation")
    monkeypatch.setattr(module, "__name__", "__main__")
    monkeypatch.setattr(module.Config, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    assert benchmark.parse([]).config.own_code == found[-1]
    sys.modules.pop("angles_of_mine")


SUBCLASS = """
from benchmarks.flair.train import Flair

class Mine(Flair):
    pass

EXPERIMENT = Mine
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with a benchmark of one's own that has the config of one of ours."""
    path = tmp_path / "mine_of_mine.py"
    path.write_text(SUBCLASS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop(path.stem, None)


def test_a_benchmark_of_ones_own_with_our_config_counts_its_file(mine: Path) -> None:
    """As in the example of docs/extending.md: an edited task is another run; our benchmark counts nothing."""
    experiment = importlib.import_module(mine.stem).Mine
    before = experiment.benchmark.parse(["--config=fl-r-17"]).config
    mine.write_text(SUBCLASS + "# edited\n")
    after = experiment.benchmark.parse(["--config=fl-r-17"]).config
    assert None not in (before.own_code, after.own_code)
    assert before.own_code != after.own_code
    assert Flair.benchmark.parse(["--config=fl-r-17"]).config.own_code is None
    assert list(own_code(type(after), experiment.benchmark.own)) == [mine.stem]
    ours = config_tree(Flair.benchmark.parse(["--config=fl-r-17"]).config)
    assert run_differences(ours, experiment.benchmark.parse(["--config=fl-r-17"])) == [
        f"own_code: None -> {after.own_code}"
    ]


def test_a_run_of_ones_own_benchmark_is_read_by_it(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = importlib.import_module(mine.stem).Mine
    runs = {name: make_run(tmp_path / name, finished=False) for name in ("own", "ours")}
    config = experiment.benchmark.parse(["--config=fl-r-17"]).config
    (runs["own"] / "config.yaml").write_text(yaml.safe_dump(config_tree(config)))
    monkeypatch.setenv("FL_IMPORT", mine.stem)
    assert [read_any(runs[name])[1] for name in ("own", "ours")] == [experiment, Flair]
    monkeypatch.delenv("FL_IMPORT")
    assert read_any(runs["own"])[1] is Flair


def test_a_file_that_runs_as_a_command_may_be_named_as_ones_own(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not run a second time, in which it would register its things twice."""
    main = ModuleType("__main__")
    main.__file__ = str(mine)
    monkeypatch.setitem(sys.modules, "__main__", main)
    for name in (mine.stem, str(mine)):
        monkeypatch.setenv("FL_IMPORT", name)
        assert own_modules() == [main]
    assert mine.stem not in sys.modules
