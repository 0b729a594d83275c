"""`make doctor` on packages: what is missing or of another version, in a checkout and an installed one."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.doctor import command, packages
from tests.benchmarks.doctor.test_doctor import examine, texts

REAL = metadata.version


def versions(known: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of these versions, or none; all others as they are."""

    def version(name: str) -> str:
        found = known.get(name, "there")
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return REAL(name) if found == "there" else found

    monkeypatch.setattr(metadata, "version", version)


def test_a_machine_without_torch_and_pfl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    versions({"torch": None, "pytest": None, "pfl": "0.5.9"}, monkeypatch)
    code, report = examine(tmp_path, monkeypatch)
    lines = capfd.readouterr().out.splitlines()
    assert code == 1
    assert report["versions"]["torch"] is None
    assert "torch missing, wanted " + _pin("torch") in report["pins_not_met"]
    assert "No self-test, as torch or pfl is not installed" in lines
    install = f"{sys.executable} -m pip install -r requirements.txt"
    assert [line for line in lines if line.startswith("fault: ")] == [
        f"fault: not installed: torch: {install}",
        f"fault: other versions than those that were tested: pfl is 0.5.9, not 0.6.0: {install}",
    ]
    assert any(
        line.startswith("hint: not installed, and needed by make test alone: pytest: ") for line in lines
    )
    assert lines[-1] == "not well: repair the 2 faults named above"


def _pin(name: str) -> str:
    return next(pin.wanted for pin in packages.pins(packages.REQUIREMENTS) if pin.name == name)


def test_pins_are_read_with_the_kind_that_they_are_of(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# words\npfl==0.6.0  # why\nno-such-thing==1\n# tests and checks\nruff==0\n")
    found = list(packages.pins(file))
    assert [(pin.name, pin.wanted, pin.for_tests) for pin in found] == [
        ("pfl", "0.6.0", False), ("no-such-thing", "1", False), ("ruff", "0", True),
    ]  # fmt: skip
    assert [pin.is_met for pin in found] == [True, False, False]
    assert any(pin.for_tests for pin in packages.pins(packages.REQUIREMENTS))


@pytest.mark.parametrize(
    ("wanted", "found", "met"),
    [
        ("2.15.0", "2.15.0+cu132", True),
        ("2.15.0", "2.15.1", False),
        (">=2.11,<2.16", "2.15.0+cu132", True),
        (">=2.11,<2.16", "2.16.0", False),
        (">=2.11,<2.16", None, False),
        ("==0.6.0", "0.6.0", True),
        ("", "", True),
    ],
)
def test_a_pin_is_a_version_or_bounds(wanted: str, found: str | None, met: bool) -> None:
    assert packages.Pin("torch", wanted, found, False).is_met is met


def test_bounds_cannot_be_compared_without_a_package_that_may_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "packaging.specifiers", None)
    assert packages.Pin("torch", ">=2.11", "1.0", False).is_met


def test_an_installed_package_needs_what_its_metadata_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no requirements.txt beside it, and nothing in what is said speaks of one."""
    monkeypatch.setattr(packages, "REQUIREMENTS", tmp_path / "requirements.txt")
    monkeypatch.setattr(
        metadata,
        "requires",
        lambda name: ["torch<2", "h5py>=3.10", 'wandb>=9; extra == "wandb"', "no-such (>=1)"],
    )
    versions({packages.DISTRIBUTION: "1.0"}, monkeypatch)
    report: dict[str, Any] = {}
    lines, notes = packages.software(report)
    install = f"{packages.python_command()} -m pip install flair-on-pfl"
    assert lines[1] == "flair-on-pfl 1.0: 1 of 3 packages that it needs are here"
    assert texts(notes) == [
        f"fault: not installed: no-such: {install}",
        f"hint: other versions than those that were tested: torch is {REAL('torch')}, not <2: {install}",
    ]
    assert "requirements" not in packages.reinstall_command()
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert "make" not in str(packages.software(report)[1][0])


def test_half_a_checkout_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    _, notes = packages.software({}, tmp_path / "requirements.txt")
    assert texts(notes) == ["fault: there is no requirements.txt here: check out the whole project"]


def test_a_python_that_pfl_does_not_know_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert texts(packages.software({})[1])[0].startswith("fault: Python is ")


def test_python_is_called_as_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert packages.python_command() == ".venv/bin/python"
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert packages.python_command() == "/usr/bin/python3"
