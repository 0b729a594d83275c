"""Python and the packages: which are here, which were tested, and the command that brings them.

In a checkout, requirements.txt says what was tested. An installed package has no such file; what it needs
then stands in its own metadata.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.doctor.note import Note, fault, hint

REPOSITORY = Path(__file__).parents[2]
"""The checkout, or the folder that an installed package lies in."""
REQUIREMENTS = REPOSITORY / "requirements.txt"
DISTRIBUTION = "flair-on-pfl"
FOR_TESTS = "# tests and checks"
"""The line of requirements.txt from which on runs need nothing."""
PYTHONS = (3, 10), (3, 12)
"""The oldest and the newest that pfl 0.6 works on."""
SHOWN = ("torch", "torchvision", "pfl", "numpy", "h5py")
RELIED_ON = frozenset(("pfl",))
"""Packages of which another version is a fault: private parts of them are used."""


def python_command() -> str:
    """This Python as it is called from here: ``.venv/bin/python`` in a checkout that was set up."""
    here, program = Path.cwd(), Path(sys.executable)
    return str(program.relative_to(here)) if program.is_relative_to(here) else str(program)


def install_command() -> str:
    """What installs the packages that are missing or of another version."""
    return f"{python_command()} -m pip install {_what()}"


def reinstall_command() -> str:
    """What installs packages again that are damaged."""
    what = _what() if REQUIREMENTS.is_file() else "torch torchvision numpy"
    return f"{python_command()} -m pip install --force-reinstall {what}"


def _what() -> str:
    return "-r requirements.txt" if REQUIREMENTS.is_file() else DISTRIBUTION


@dataclass(frozen=True)
class Pin:
    """What is asked for beside what is installed."""

    name: str
    wanted: str
    """A version, or bounds of versions as ``>=2.11,<2.16``."""
    found: str | None
    for_tests: bool

    @property
    def is_met(self) -> bool:
        """Whether it is this version; a build of another kind (``2.15.0+cu130``) is the same."""
        if self.found is None:
            return False
        version = self.found.partition("+")[0]
        if not re.search(r"[<>=~!]", self.wanted):
            return version == self.wanted
        try:
            from packaging.specifiers import SpecifierSet
        except ImportError:  # it comes with matplotlib, whose own line says that it is missing
            return True
        return SpecifierSet(self.wanted).contains(version, prereleases=True)


def installed(name: str) -> str | None:
    """The version of a package that is installed here."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def pins(file: Path) -> Iterator[Pin]:
    """Each line ``name==version``.

    Raises:
        OSError: where it cannot be read.
    """
    for_tests = False
    for line in file.read_text(encoding="utf-8").splitlines():
        for_tests = for_tests or line.startswith(FOR_TESTS)
        match = re.match(r"([\w.-]+)==([\w.+!-]+)", line)
        if match:
            yield Pin(match[1], match[2], installed(match[1]), for_tests)


def needs() -> Iterator[Pin]:
    """What the installed package says that it needs, without its extras.

    Raises:
        PackageNotFoundError: where it is not installed.
    """
    for text in metadata.requires(DISTRIBUTION) or ():
        match = re.match(r"([\w.-]+)\s*([^;]*)(?:;(.*))?", text)
        if match and "extra" not in (match[3] or ""):
            yield Pin(match[1], match[2].strip(" ()"), installed(match[1]), False)


def software(report: dict[str, Any], file: Path | None = None) -> tuple[list[str], list[Note]]:
    """Python, the packages, and which of those that are asked for are not here.

    Args:
        report: gets what was found.
        file: requirements.txt, that of the checkout by default; where it is not there, what the installed
            package needs is looked at.
    """
    file = REQUIREMENTS if file is None else file
    versions = {name: installed(name) for name in SHOWN}
    shown = ", ".join(f"{name} {version or 'is missing'}" for name, version in versions.items())
    report["versions"] = {"python": platform.python_version(), **versions}
    report["system"] = platform.platform()
    lines, notes = [f"Python {platform.python_version()}, {shown}"], []
    oldest, newest = PYTHONS
    if not oldest <= sys.version_info[:2] <= newest:
        remedy = "make setup PYTHON=python3.11" if file.is_file() else "install it for one of these"
        notes.append(
            fault(f"Python is {platform.python_version()}, and pfl 0.6 needs 3.10 to 3.12: {remedy}")
        )
    try:
        wanted = list(pins(file) if file.is_file() else needs())
    except metadata.PackageNotFoundError:
        return lines, [*notes, fault(f"there is no {file.name} here: check out the whole project")]
    except OSError as error:
        return lines, [*notes, fault(f"{file.name} cannot be read ({error.strerror}): check out the project")]
    unmet = [pin for pin in wanted if not pin.is_met]
    report["pins_not_met"] = [f"{pin.name} {pin.found or 'missing'}, wanted {pin.wanted}" for pin in unmet]
    met = f"{len(wanted) - len(unmet)} of {len(wanted)}"
    lines.append(
        f"{file.name}: {met} pins are met"
        if file.is_file()
        else f"{DISTRIBUTION} {installed(DISTRIBUTION)}: {met} packages that it needs are here"
    )
    return lines, [*notes, *_unmet(unmet)]


def _unmet(unmet: list[Pin]) -> Iterator[Note]:
    """Notes of what is missing, of a kind with its remedy in one."""
    install = install_command()
    missing = [pin for pin in unmet if pin.found is None]
    for kind, for_tests, what in (
        (fault, False, "not installed"),
        (hint, True, "not installed, and needed by make test alone"),
    ):
        if chosen := [pin.name for pin in missing if pin.for_tests is for_tests]:
            yield kind(f"{what}: {', '.join(chosen)}: {install}")
    for kind, relied_on in ((fault, True), (hint, False)):
        others = [pin for pin in unmet if pin.found is not None and (pin.name in RELIED_ON) is relied_on]
        if others:
            each = ", ".join(f"{pin.name} is {pin.found}, not {pin.wanted}" for pin in others)
            yield kind(f"other versions than those that were tested: {each}: {install}")
