"""What a new thing takes: one file, which is found by its name (docs/architecture.md has the table)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import dataset.partitions.drawn
import pfl_ext.algorithms
import pfl_ext.models
from benchmarks.core.config.digests import digest, experiment_digest
from benchmarks.core.own_code import own_code
from benchmarks.flair.config import parse
from benchmarks.sweep.command import training_words
from benchmarks.sweep.space import command_words, read_sweep
from dataset.partitions.drawn import drawn
from dataset.store.hdf5 import DataFile
from dataset.store.views import SingleLabelView
from pfl_ext.algorithms.algorithm import ALGORITHMS
from pfl_ext.algorithms.optimizers import SERVER_OPTIMIZERS, server_optimizer
from pfl_ext.models.small import NETWORKS
from pfl_ext.registry import Registry
from pfl_ext.rules import Rule
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed, killed_at
from tests.benchmarks.conftest import classes_file as classes_file
from tests.benchmarks.conftest import mini_file as mini_file
from tests.benchmarks.conftest import refused as refused
from tests.benchmarks.conftest import train as train
from tests.benchmarks.conftest import vision as vision
from tests.benchmarks.run_files import error_line, lines, results
from tests.benchmarks.sweep.test_space import written
from tests.dataset.cifar10.made_cifar import CIFAR10, write_parquet
from tests.dataset.cifar10.test_cifar import make
from tests.launching import environment, warmly

DROPPED = Path(__file__).parent / "dropped"


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of `tests.dropped` lie in the packages of the house, not looked through since."""
    registries: tuple[Registry[Any], ...] = (ALGORITHMS, SERVER_OPTIMIZERS, NETWORKS)
    for look in (dataset.partitions.drawn.drawers, *(registry.names for registry in registries)):
        look()  # what registers itself in this test alone is forgotten after it
    for package in (pfl_ext.algorithms, pfl_ext.models, dataset.partitions):
        folder = DROPPED / package.__name__.rpartition(".")[2]
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        for file in folder.glob("[a-z]*.py"):
            monkeypatch.delitem(sys.modules, f"{package.__name__}.{file.stem}", raising=False)
    monkeypatch.setattr(dataset.partitions.drawn, "_DRAWERS", dict(dataset.partitions.drawn._DRAWERS))
    for registry in registries:
        monkeypatch.setattr(registry, "_things", dict(registry._things))
        monkeypatch.setattr(registry, "_is_complete", False)


NEW = ("--federated.algorithm=slowmo", "--federated.options.beta=0.25")


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_a_new_algorithm_a_new_network_train_and_go_on(engine: str, dropped: None, train: Train) -> None:
    argv = (*NEW, "--model.arch=leaf_cnn", f"--runtime.engine={engine}", "--federated.num_rounds=2")
    whole, _ = killed_and_resumed(train, 1, *argv)
    assert (results(whole)["arithmetic"] == "float32, pfl's own loop") == (engine == "stock")
    assert len(lines(whole)) == 3
    plain = train(*argv[2:], "--server.optimizer=sgd", "--server.learning_rate=1", name="plain")
    assert results(plain)["model_sha256"] != results(whole)["model_sha256"]
    assert lines(plain)[1]["val"] == lines(whole)[1]["val"], "the first round has no momentum yet"


def test_a_rule_with_a_loss_that_nothing_would_call_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Own has a loss, which is no part of a Rule"):
        type("Own", (Rule,), {"loss": len})


def test_a_new_server_optimizer_trains_and_says_which_keys_it_reads(
    dropped: None, train: Train, refused: Refused
) -> None:
    argv = ("--server.optimizer=amsgrad", "--server.learning_rate=0.01")
    assert results(train(*argv))["rounds"] == 3
    expected = "--server.momentum has no effect where server.optimizer is amsgrad: remove it, or choose sgd"
    refused(expected, *argv, "--server.momentum=0.5", name="other")
    assert parse([*argv, "--config=pfl-r-17"]).config.privacy, "it works on the noisy mean alone"


LION = ("--server.optimizer=lion", "--server.learning_rate=0.001")
DECAY = "--server.options.weight_decay"


def test_a_new_server_optimizer_has_an_option_of_its_own_trains_and_goes_on(
    dropped: None, train: Train, refused: Refused
) -> None:
    argv = (*LION, "--runtime.checkpoint_every=1")
    whole = train(*argv, f"{DECAY}=20", name="whole")
    assert results(train(*argv, name="none"))["model_sha256"] != results(whole)["model_sha256"]
    with killed_at(2):
        train(*argv, f"{DECAY}=20", code=130)
    refused("server.options.weight_decay: 20.0 -> 10.0", *argv, f"{DECAY}=10")
    assert results(train(*argv, f"{DECAY}=20"))["model_sha256"] == results(whole)["model_sha256"]


def test_the_option_of_a_new_server_optimizer_is_in_private_configs_and_sweeps(
    dropped: None, tmp_path: Path
) -> None:
    private = parse([*LION, f"{DECAY}=2", "--config=pfl-r-17"]).config
    assert private.privacy, "it works on the noisy mean alone"
    assert private.server.options == {"weight_decay": 2.0}
    x, m = torch.nn.Parameter(torch.tensor([2.0, -2.0])), torch.zeros(2)
    optimizer = private.server.build([x], private.server.chosen_options)
    for gradient in torch.tensor([[1.0, 1.0], [-0.001, -2.0]]):
        x.grad, before = gradient.clone(), x.detach().clone()
        optimizer.step()
        expected = torch.sign(0.9 * m + 0.1 * gradient) + 2 * before
        torch.testing.assert_close((before - x.detach()) / 0.001, expected, rtol=1e-3, atol=0)
        m = private.server.beta2 * m + (1 - private.server.beta2) * gradient
    path = written(tmp_path, {"server.optimizer": {"value": "lion"}, DECAY[2:]: {"values": [0, 1, 2]}})
    sweep = read_sweep(path)[0]
    runs = [parse([*training_words(sweep, []), *command_words(point)]) for point in sweep.grid()]
    assert [run.config.server.options for run in runs] == [{"weight_decay": d} for d in (0, 1, 2)]
    assert len({digest(run.config) for run in runs}) == 3


@pytest.mark.parametrize(
    "argv, message",
    [
        ([f"{DECAY}=1"], "weight_decay is not an option of adam, which has none under server.options"),
        ([LION[0], f"{DECAY}=-1"], "server.options.weight_decay is '-1': input should be greater than or"),
        ([LION[0], "--server.options.decay=1"], "decay is not an option of lion, which has weight_decay"),
        (
            [LION[0], "--server.epsilon=0.1"],
            "--server.epsilon has no effect where server.optimizer is lion: ",
        ),
        (["--config=c-r-17", *LION, f"{DECAY}=1"], "has no effect where mode is centralised"),
        (["--config=pfl-r-17", NEW[0]], "privacy refuses federated.algorithm = slowmo ("),
        (["--federated.weighting=users", "--local_privacy.epsilon=4", NEW[0]], "local_privacy refuses fed"),
        ([NEW[0], "--federated.options.beta=2"], "federated.options.beta is '2': "),
        (
            ["--federated.algorithm=slomo"],
            "choose one of confident, ditto, dsgd, fed3r, fedavg, fedbn, ",
        ),
        (["--server.optimizer=amsgrat"], "server.optimizer is 'amsgrat': choose one of adagrad, adam, ams"),
        (["--model.arch=leaf_cmn"], "did you mean leaf_cnn?"),
    ],
)
def test_what_nobody_has_argued_or_written_is_refused_in_one_line(
    argv: list[str], message: str, dropped: None, refused: Refused
) -> None:
    refused(message, *argv)


def test_an_algorithm_whose_file_argues_for_privacy_is_private_without_another_file(
    dropped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALGORITHMS["slowmo"], "refusals", {})
    config = parse(["--config=pfl-r-17", *NEW]).config
    assert config.federated.options == {"beta": 0.25}
    assert config.privacy is not None


def test_a_new_partition_is_drawn_by_its_name_and_trained_on(
    dropped: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(CIFAR10, tmp_path / "in")
    path, source = tmp_path / "cifar.hdf5", ["--source", str(tmp_path / "in"), "--splits", "none"]
    size = ["--clients", "5", "--images_per_client", "12"]
    assert make(CIFAR10, path, *source, *size, "--partition", "power=2, dirichlet-total=0.3") == 0
    assert "partition power-2-seed-0: 5 users" in capsys.readouterr().err
    with DataFile(path) as file:
        split = SingleLabelView(file, "power-2-seed-0").split("train")
        shares = np.diff(split.user_offsets) / split.num_images
        np.testing.assert_allclose(shares, np.array([1, 4, 9, 16, 25]) / 55, atol=1 / split.num_images)
        assert sorted(split.file_rows.tolist()) == list(range(split.num_images))
        drawn = file.provenance["drawn"]["power-2-seed-0"]
        assert drawn == {"kind": "power", "number": 2, "seed": 0}
    for asked, message in (("powers=2", "pfl-dirichlet=NUMBER, power=NUMBER, "), ("power=x", "power=1")):
        assert make(CIFAR10, tmp_path / "other.hdf5", *source, "--partition", asked) == 2
        assert message in error_line(capsys)


@pytest.mark.parametrize(
    "text, message",
    [
        ("def x(:", "(SyntaxError: invalid syntax (broken.py, line 1)): repair the file, or move it away"),
        ("import nothing_of_the_kind", "(ModuleNotFoundError: No module named 'nothing_of_the_kind')"),
        ("1 / 0", "(ZeroDivisionError: division by zero)"),
    ],
)
@pytest.mark.parametrize(
    "package, argv",
    [
        (pfl_ext.algorithms, "--server.optimizer=adam"),
        (pfl_ext.algorithms, "--federated.algorithm=fedavg"),
        (pfl_ext.models, "--model.arch=cifar_cnn"),
        (dataset.partitions, "--partition=dirichlet-total=1"),
    ],
)
def test_a_new_file_that_cannot_be_imported_is_one_line(
    package: ModuleType,
    argv: str,
    text: str,
    message: str,
    dropped: None,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "broken.py").write_text(text)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "new")])
    if package is dataset.partitions:
        assert make(CIFAR10, tmp_path / "cifar.hdf5", argv) == 2
    else:
        train(argv, code=2)
    assert f"{package.__name__}.broken cannot be imported {message}" in error_line(capsys)


OWN = """
from torch import nn
from pfl_ext.models.small import NETWORKS

@NETWORKS.register("linear_of_mine")
def linear_of_mine(num_labels: int, input_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * input_size**2, num_labels))
"""


def test_a_module_outside_the_tree_is_found_by_every_command_and_recorded(
    mini_file: Path, tmp_path: Path
) -> None:
    """In processes of their own, in the folder where the file lies, which is not on Python's path."""
    (tmp_path / "mine.py").write_text(OWN)
    words = [
        f"--data_path={mini_file}",
        "--run_dir=run",
        "--model.arch=linear_of_mine",
        "--federated.num_rounds=1",
        "--data.image_size=16",
        "--model.input_size=16",
        "--federated.cohort_size=2",
        "--runtime.threads=1",
    ]
    for command in (["benchmarks.flair.train", *words], ["benchmarks.flair.report", "run"]):
        done = subprocess.run(
            warmly(*command), cwd=tmp_path, env=environment(FL_IMPORT="mine"), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert results(tmp_path / "run")["own_code"] == {"mine": hashlib.sha256(OWN.encode()).hexdigest()}


def test_an_edited_file_of_ones_own_is_another_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no seed of the same experiment either; a run that uses nothing of the file does not change."""
    monkeypatch.setattr(NETWORKS, "_things", dict(NETWORKS._things))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    helper, own = tmp_path / "sides_of_mine.py", tmp_path / "net_of_mine.py"
    helper.write_text("def inputs(side): return 3 * side**2\n")
    text = OWN.replace("linear_of_mine", "net_of_mine").replace("3 * input_size**2", "inputs(input_size)")
    own.write_text(f"from sides_of_mine import inputs\n{text}")
    plain = parse(["--model.arch=lenet"]).config
    monkeypatch.setenv("FL_IMPORT", "net_of_mine")
    assert parse(["--model.arch=lenet"]).config == plain
    words = ("--model.arch=net_of_mine", "--federated.num_rounds=1")
    directory = train(*words)
    before = parse(words).config
    assert f"\nown_code: {before.own_code}\n" in (directory / "config.yaml").read_text()
    assert list(results(directory)["own_code"]) == ["net_of_mine", "sides_of_mine"]
    train(*words)
    assert "this run has already finished" in capsys.readouterr().out
    for file in (helper, own):
        file.write_text(f"{file.read_text()}# another version\n")
        train(*words, code=2)
        now = parse(words).config
        assert f"another config (own_code: {before.own_code} -> {now.own_code})" in error_line(capsys)
        assert experiment_digest(asdict(now), type(now)) != experiment_digest(asdict(before), type(before))
    for name in ("net_of_mine", "sides_of_mine"):
        del sys.modules[name]
    monkeypatch.delenv("FL_IMPORT")
    assert parse(["--own_code=abc"]).config.own_code is None


OTHERS = """
from functools import partial
from sizes_of_mine import SIDES
from helpers_of_mine import layers
from pfl_ext.models.small import NETWORKS, Configured

def build(num_labels, config): return layers(num_labels, SIDES)
def plain(num_labels, input_size, more): return layers(num_labels, more)
NETWORKS.register("configured_of_mine")(Configured(build, reads=()))
NETWORKS.register("partial_of_mine")(partial(plain, more=SIDES))
"""


def test_all_that_ones_own_file_imports_from_its_folder_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants and packages, too; and what is registered need be no function of the file."""
    monkeypatch.setattr(NETWORKS, "_things", dict(NETWORKS._things))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helpers_of_mine").mkdir()
    files = {
        "others_of_mine.py": OTHERS,
        "sizes_of_mine.py": "SIDES = 3\n",
        "helpers_of_mine/__init__.py": "from helpers_of_mine.inner import layers\n",
        "helpers_of_mine/inner.py": "from torch import nn\ndef layers(k, n): return nn.Linear(n, k)\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("FL_IMPORT", "others_of_mine")
    assert {name.partition("/")[0] for name in own_code()} == {
        "others_of_mine", "sizes_of_mine", "helpers_of_mine",
    }  # fmt: skip
    archs = [f"--model.arch={kind}_of_mine" for kind in ("configured", "partial")]
    before = [parse([arch]).config.own_code for arch in archs]
    assert None not in before
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}# edited\n")
        assert parse([archs[0]]).config.own_code != before[0], name
        (tmp_path / name).write_text(text)
    assert [parse([arch]).config.own_code for arch in archs] == before
    for name in ("others_of_mine", "sizes_of_mine", "helpers_of_mine", "helpers_of_mine.inner"):
        del sys.modules[name]


def test_a_module_of_ones_own_that_is_not_there_is_said_before_any_config(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FL_IMPORT", "nothing_of_mine")
    train(code=2)
    assert error_line(capsys).startswith("error: FL_IMPORT names nothing_of_mine, which cannot be imported")


def test_every_file_of_a_package_of_ones_own_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "two_of_mine" / "below").mkdir(parents=True)
    (tmp_path / "two_of_mine" / "below" / "b.py").write_text("b = 1")
    monkeypatch.setenv("FL_IMPORT", " two_of_mine, ")
    assert own_code() == {"two_of_mine/below/b.py": hashlib.sha256(b"b = 1").hexdigest()}
    del sys.modules["two_of_mine"]


@pytest.mark.parametrize("register", [ALGORITHMS.register, NETWORKS.register, server_optimizer, drawn])
def test_a_name_that_is_taken_is_refused(register: Any, dropped: None) -> None:
    register("one")(len)
    with pytest.raises(ValueError, match=r"^there are two [a-z. -]+ named one: rename one$"):
        register("one")(repr)


def test_new_files_leave_the_digests_of_other_configs_alone(request: pytest.FixtureRequest) -> None:
    before = digest(parse([]).config)
    request.getfixturevalue("dropped")
    assert digest(parse([]).config) == before
    assert "lion" in parse([]).config.server.readers()["server.beta1"]
