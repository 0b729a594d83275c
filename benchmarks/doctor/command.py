"""Say what this machine has, how a run is computed on it and why, and test that for at most a minute.

    python -m benchmarks.doctor [--report FILE]

The last lines say what is not well and what to do about it, the very last one whether anything must be done.
A report for an issue is written, without the names of users, machines and home folders. Exit codes: 0: well,
or nothing but hints; 1: something is faulty; 2: a wrong argument.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.core.commands import command_parser
from benchmarks.doctor import findings, machine, packages
from benchmarks.doctor.asking import Answer, Event, ask
from benchmarks.doctor.note import Note, fault
from benchmarks.doctor.report_file import redacted
from dataset.cli import output_file
from dataset.files import write_json

DEFAULT = Path("doctor-report.json")
TITLES = {
    "device": "",
    "path": "How a run is computed here (fl-r-17, with the defaults)",
    "trial": "Self-test: the same users trained by pfl's own loop and by the engine",
    "horovod": "",
}
"""What is printed before a stage's lines."""


class Examination:
    """What was found so far, printed as it comes."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self.notes: list[Note] = []

    def found(self, lines: Sequence[str], notes: Sequence[Note]) -> None:
        """Print and keep."""
        for line in lines:
            print(f"  {line}", flush=True)
        self.notes += notes

    def look(self) -> None:
        """Look at the machine, with nothing imported."""
        print("What was found")
        for part in (packages.software, machine.hardware, machine.gpus, machine.compilers, machine.disks):
            self.found(*part(self.report))

    def hear(self, event: Event) -> None:
        """A line of the child's."""
        stage = event["stage"]
        if event["event"] == "begin":
            if title := TITLES.get(stage):
                print(title, flush=True)
            return
        if event["event"] == "end":
            return
        facts = {key: value for key, value in event.items() if key not in ("stage", "event")}
        self._keep(stage, facts)
        if "failed" in facts:
            self.found(*findings.failed(facts))
        elif stage == "trial":
            self.found(*findings.trial(facts))
        elif stage in ("device", "path", "horovod"):
            self.found(*getattr(findings, stage)(facts, self.report))

    def _keep(self, stage: str, facts: Mapping[str, Any]) -> None:
        if stage == "trial" and "failed" not in facts:
            if not facts.get("begun"):
                self.report.setdefault("self_test", []).append(facts)
            return
        self.report[stage] = {**self.report.get(stage, {}), **facts}

    def judge(self, answer: Answer) -> None:
        """A child has ended."""
        if answer.stage:
            self.notes.append(findings.ended(answer.stage, answer.how, answer.output))
            self.report["ended"] = {"stage": answer.stage, "how": answer.how}
        self.report.setdefault("output", []).extend(answer.output)


def examined() -> Examination:
    """The whole examination, printed as it goes on."""
    seen = Examination()
    seen.look()
    if find_spec("torch") is None or find_spec("pfl") is None:
        print("No self-test, as torch or pfl is not installed")
        return seen
    seen.judge(ask(("imports", "device", "path", "trial"), seen.hear))
    if "commit" not in seen.report.get("imports", {}):
        print("No self-test, as what a run needs cannot be imported")
        return seen
    if find_spec("horovod") is not None:
        print("Several workers")
        seen.judge(ask(("horovod",), seen.hear))
    else:
        build = (
            "make horovod" if packages.REQUIREMENTS.is_file() else "python -m pfl_ext.workers.build_horovod"
        )
        print(f"Several workers\n  Horovod: not built; torchrun, the default, needs none (or: {build})")
    return seen


def main(argv: Sequence[str]) -> None:
    """Examine this machine.

    Raises:
        ValueError: for a wrong argument.
        SystemExit: code 1: something is faulty.
    """
    parser = command_parser("doctor", __doc__)
    parser.add_argument("--report", type=Path, default=DEFAULT, help="the report's file")
    path: Path = parser.read(argv).report
    if path != DEFAULT:
        output_file("--report", path)
    seen = examined()
    seen.report["notes"] = [str(note) for note in seen.notes]
    try:
        output_file("the report", path)
        write_json(path, redacted(seen.report))
        written = f"report for an issue, without names of users and folders: {path}"
    except (OSError, ValueError) as refusal:
        seen.notes.append(fault(str(refusal).replace("choose another path", "name another by --report")))
        written = "no report could be written"
    print(f"\n{written}")
    for note in seen.notes:
        print(note)
    faults = sum(note.is_fault for note in seen.notes)
    print(verdict(faults, len(seen.notes) - faults))
    if faults:
        sys.exit(1)


def verdict(faults: int, hints: int) -> str:
    """The last line."""
    if faults:
        return f"not well: repair {'the fault' if faults == 1 else f'the {faults} faults'} named above"
    if hints:
        return f"all is well; {'the hint' if hints == 1 else f'the {hints} hints'} above would make it better"
    return "all is well"
