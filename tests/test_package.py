"""The package as somebody installs it: what the wheel holds and needs, its commands in an empty folder."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement

from benchmarks import console
from benchmarks.doctor.packages import FOR_TESTS
from dataset.files import needed
from pfl_ext.workers.build_horovod import BUILDING, CMAKE, RUNTIME
from tests.benchmarks.conftest import SMALL

ROOT = Path(__file__).parents[1]
ROOTS = ("benchmarks", "dataset", "pfl_ext")
toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # of pytest's
PROJECT = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [Requirement(text) for text in PROJECT["dependencies"]]
OF_EXTRA = PROJECT["optional-dependencies"]
EXTRAS = [Requirement(text) for name, extra in OF_EXTRA.items() if name != "horovod" for text in extra]
PINNED = {
    one.name.lower(): one
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if (text := line.partition("#")[0].strip())
    for one in [Requirement(text)]
}
READ = {".yaml", ".json", ".h", ".cpp", ".sh", ".py", ".typed"}
"""Endings of the files that code reads."""
OF_BENCHES = {"flwr", "opacus", "ray"}
"""Packages in environments of their own: ``make bench-peers``, ``make opacus-peer``."""

TWO_SCRIPTS = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, ended.code
"""
"""Scripts that pip installed, one after the other, so that torch is imported once."""

pytestmark = pytest.mark.xdist_group("package")


def tracked() -> list[str]:
    try:
        words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *ROOTS]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout of git, which says what belongs to the package")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tracked files alone, in a folder of their own."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in [*tracked(), "pyproject.toml", "README.md", "LICENSE"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(made)]
    subprocess.run([*pip, str(source)], check=True)
    (wheel,) = made.iterdir()
    return wheel


def test_the_wheel_has_every_file_that_code_reads_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {name for name in tracked() if Path(name).suffix in READ}
    assert own <= names
    assert {name.partition("/")[0] for name in names - own} == {
        wheel.name.rpartition("-py3")[0] + ".dist-info"
    }


def test_what_is_needed_is_pinned_and_what_is_imported_is_needed() -> None:
    for one in (*NEEDED, *EXTRAS):
        (pin,) = PINNED[one.name.lower()].specifier
        assert one.specifier.contains(pin.version), one
    known = {one.name.lower().replace("_", "-") for one in (*NEEDED, *EXTRAS)}
    found = packages_distributions()
    for path in (path for root in ROOTS for path in (ROOT / root).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {*ROOTS}:
                brings = {one.lower().replace("_", "-") for one in found.get(name, ())}
                assert brings & known or name in OF_BENCHES | {"horovod"} | _of_pfl(name), f"{path}: {name}"


def test_extras_have_what_a_checkout_tests_with_and_what_builds_horovod() -> None:
    checks = (ROOT / "requirements.txt").read_text().partition(FOR_TESTS)[2]
    assert OF_EXTRA["dev"] == re.findall(r"(?m)^([A-Za-z_-]+)==", checks)
    assert set(OF_EXTRA["horovod"]) == {CMAKE, *BUILDING, *RUNTIME}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the lock file is for Python 3.11 and 3.12")
def test_the_lock_file_has_every_pin_with_hashes_and_installs_without_resolving() -> None:
    """``make lock`` writes it; ``make setup`` installs from it, and fails where a hash differs."""
    text = re.sub(r"(?m)^ *#.*\n", "", (ROOT / "requirements.lock").read_text())
    locked: dict[str, set[str]] = {}
    for entry in re.split(r"\n(?! )", text.strip()):
        requirement, *hashes = entry.split(" \\\n    --hash=")
        one = Requirement(requirement)
        assert hashes, one
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in hashes), one
        locked.setdefault(one.name, set()).add(str(one.specifier))
    for name, pin in PINNED.items():
        assert locked[name.replace("_", "-")] == {str(pin.specifier)}, "run: make lock"
    for name in locked:
        for text in metadata.requires(name) or () if _is_installed(name) else ():
            needs = Requirement(text)
            wanted = needs.marker is None or needs.marker.evaluate({"extra": ""})
            assert not wanted or needs.name.lower().replace("_", "-").replace(".", "-") in locked, (
                name,
                text,
            )


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _of_pfl(name: str) -> set[str]:
    """The name, if it is of a package that pfl or torch brings whatever its version."""
    return {name} & {"typing_extensions", "packaging", "triton"}


def test_a_package_that_is_not_there_is_named_with_its_extra() -> None:
    with (
        mock.patch.dict(sys.modules, {"wandb": None}),
        pytest.raises(ValueError, match=r"^wandb is not installed: pip install 'flair-on-pfl\[wandb\]'"),
    ):
        needed("wandb", "wandb")
    assert needed("json", "none") is json


@pytest.mark.parametrize("program", list(PROJECT["scripts"]))
def test_a_command_lists_what_it_can_do_and_refuses_the_rest(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function = getattr(console, PROJECT["scripts"][program].partition(":")[2])
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    if program in ("fl-predict", "fl-sweep", "fl-doctor"):
        with pytest.raises(SystemExit):
            function()
        return
    assert function() == 0
    listed = re.findall(r"(?m)^  (\S+) +(\S.*)$", capsys.readouterr().out)
    assert len(listed) > 4
    monkeypatch.setattr(sys, "argv", [program, "nothing"])
    assert function() == 2
    said = capsys.readouterr().err
    assert said == f"error: {program} nothing: choose one of {', '.join(name for name, _ in listed)}\n"
    name = listed[0][0]
    monkeypatch.setattr(sys, "argv", [program, name, "--help"])
    with pytest.raises(SystemExit) as ended:
        function()
    assert not ended.value.code


def test_the_table_for_a_paper_is_made_by_an_installed_command() -> None:
    assert console.report_commands()["compare"] == "benchmarks.compare"


def test_an_installed_wheel_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which finds torch and the like where these tests do."""
    home, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "zz-others.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    data = "mini --output_file data/flair.hdf5 --train_users 12 --val_users 5 --test_users 5 --image_size 20"
    command = [str(home / "bin" / "fl-data"), *data.split()]
    subprocess.run(command, cwd=work, env=environment, check=True, timeout=300)
    words = ["flair", *SMALL, "--run_dir=runs/one"]
    calls = [("fl-train", words), ("fl-predict", ["runs/one", "--output=p.csv"])]
    scripts = [[str(home / "bin" / program), *words] for program, words in calls]
    command = [str(python), "-c", TWO_SCRIPTS, json.dumps(scripts)]
    subprocess.run(command, cwd=work, env=environment, check=True, timeout=300)
    assert (work / "p.csv").read_text().startswith("user,image,truth,predicted,")
    (results,) = work.glob("runs/*/results.json")
    assert json.loads(results.read_text())["commit"] == f"flair-on-pfl {PROJECT['version']}"
    stub = tmp_path / "stub" / "h5py.py"
    stub.parent.mkdir()
    stub.write_text("raise ImportError('of this test')")
    doctor = subprocess.run(
        [str(home / "bin" / "fl-doctor")], cwd=work, env={**environment, "PYTHONPATH": str(stub.parent)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert f"{len(NEEDED)} of {len(NEEDED)} packages that it needs are here" in doctor.stdout, doctor.stderr
    assert "fault: h5py cannot be imported (ImportError: of this test): " in doctor.stdout
    assert (doctor.returncode, doctor.stderr) == (1, "")
    where = "import benchmarks, pathlib; print(pathlib.Path(benchmarks.__file__).parents[1])"
    found = subprocess.run(
        [str(python), "-c", where], cwd=work, env=environment, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(packages)
