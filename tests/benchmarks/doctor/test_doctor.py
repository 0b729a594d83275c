"""`make doctor`: what it prints, its exit codes, and clear lines where something is missing or broken."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.doctor import command, findings, machine
from benchmarks.doctor.asking import SECONDS, Answer, ask
from benchmarks.doctor.command import Examination, main, verdict
from benchmarks.doctor.note import Note, fault, hint
from benchmarks.doctor.packages import REPOSITORY, reinstall_command
from benchmarks.doctor.report_file import redacted
from dataset.cli import run

GPU = {"name": "H200", "free_gb": 130.0, "whole_gb": 140.0, "works": True}
SEEN = {"cuda": "13.2", "gpus": [GPU], "nccl": "2.29.1", "bf16": True, "why_no_gpu": ""}
ON_GPU = {
    "on_gpu": True, "device": "cuda:0", "compiled": None, "threads": 8, "lanes": 4, "readers": 2,
    "float32": "float32: all layers by torch", "bf16": "bfloat16: all layers by torch",
}  # fmt: skip
HELD = {
    "case": "float32", "device": "H200", "users": 3, "deviation": 2e-6, "limit": 1e-3, "failures": [],
    "path": 0, "by": "CUDA graphs on several streams", "holds": True,
}  # fmt: skip


def texts(notes: list[Note]) -> list[str]:
    return [str(note) for note in notes]


def put_module(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that comes before the one that is installed, in new processes."""
    place = folder / "modules" / name
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(place.parent))


def examine(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a doctor in this folder, and its report."""
    monkeypatch.chdir(folder)
    code: Any = None
    with contextlib.suppress(SystemExit):
        code = run(main, words)
    report = folder / "doctor-report.json"
    return 1 if code is None else code, json.loads(report.read_text()) if report.exists() else {}


def test_a_machine_that_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole command, with its self-test; on whatever processor this is."""
    for name in ("CXX", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(SECONDS, "trial", 400.0)  # on a machine that does much else
    code, report = examine(tmp_path, monkeypatch)
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert code == 0, printed.out
    assert lines[-1].startswith("all is well")
    assert [note for note in report["notes"] if not note.startswith("hint: ")] == []
    for title in ("What was found", "How a run is computed here", "Self-test: ", "Several workers"):
        assert any(line.startswith(title) for line in lines)
    assert {"device", "path", "self_test", "versions", "processor", "disk"} <= set(report)
    assert [entry["case"] for entry in report["self_test"]][:2] == [
        "float32", "float32, each update clipped as in private training",
    ]  # fmt: skip
    assert all(entry["holds"] and entry["users"] == 3 for entry in report["self_test"])
    assert report["path"]["lanes"] >= 1
    assert report["pins_not_met"] == []
    assert not list(tmp_path.glob(".*")), "the report appears whole or not at all"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doctor-report.json"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('no libtorch_cpu.so')", "torch cannot be imported (ImportError: no libtorch_cpu"),
        (
            "import os; os.kill(os.getpid(), 4)",
            "importing what a run needs did not end well, its process was",
        ),
        ("import os; os._exit(3)", "did not end well, its process ended with code 3: INSTALL"),
        (
            "print('half a word'); raise SystemExit(7)",
            "ended with code 7; its last line: half a word: INSTALL",
        ),
        ("import time; time.sleep(60)", "did not end well, it did not end within 2 s"),
    ],
)
def test_a_torch_that_is_broken_ends_in_a_line(
    source: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    put_module(tmp_path, "torch", source, monkeypatch)
    put_module(tmp_path / "other", "unused", "", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setitem(SECONDS, "imports", 2.0 if "sleep" in source else 60.0)
    code, report = examine(tmp_path, monkeypatch)
    lines = capfd.readouterr().out.splitlines()
    assert code == 1
    assert lines[-1].startswith("not well: repair the fault")
    (note,) = [line for line in lines if line.startswith("fault: ")]
    assert said.replace("INSTALL", reinstall_command()) in note
    assert "No self-test, as what a run needs cannot be imported" in lines
    assert len(report["notes"]) == len([line for line in lines if line.startswith(("fault: ", "hint: "))])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--report"], "expected one argument"),
        (["--report="], "is empty"),
        (["--report", "there"], "--report there is a folder"),
        (["--report", "/proc/x"], "--report /proc/x cannot be written"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_a_bad_call_is_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "there").mkdir()
    code, report = examine(tmp_path, monkeypatch, *words)
    printed = capfd.readouterr()
    assert (code, report, printed.out) == (2, {}, "")
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An examination that finds nothing and asks nobody."""
    monkeypatch.setattr(command, "examined", Examination)


def test_a_report_that_cannot_be_written_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    quick(monkeypatch)
    (tmp_path / "doctor-report.json").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(main, [])
    assert ended.value.code == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[-2].startswith("fault: the report doctor-report.json is a folder")
    assert lines[-1] == "not well: repair the fault named above"


def test_a_report_goes_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    quick(monkeypatch)
    code, _ = examine(tmp_path, monkeypatch, "--report", "new/place.json")
    assert code == 0
    assert json.loads((tmp_path / "new" / "place.json").read_text())["notes"] == []
    assert capfd.readouterr().out.splitlines()[-1] == "all is well"


def test_a_report_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/ada/cache")
    tree = {
        "cache": f"{tmp_path}/ada/.cache",
        "texts": ["/scratch/ada/cache/pfl_ext/x.so", "for ada, not adamant", "/home/bob/x: no", {"n": 1.5}],
        "bad": float("nan"),
        "code": f"{REPOSITORY}/benchmarks/doctor/child.py and {sys.prefix}/lib",
    }
    clean = redacted(tree)
    text = json.dumps(clean, allow_nan=False)
    assert "bob" not in text
    assert str(tmp_path) not in text
    assert clean["cache"] == "~/.cache"
    assert clean["texts"][:2] == ["<cache>/pfl_ext/x.so", "for <user>, not adamant"]
    assert clean["texts"][3] == {"n": 1.5}
    assert clean["bad"] == "nan"
    assert clean["code"].startswith("<project>/benchmarks")


def test_no_compiler_and_a_wrong_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    report: dict[str, Any] = {}
    _, notes = machine.compilers(report)
    assert texts(notes)[0].startswith("hint: CXX is /nonexistent, which is no program here: unset CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    lines, notes = machine.compilers(report)
    assert lines == ["C++ compiler: none"]
    assert "apt-get install g++" in texts(notes)[-1]
    assert report["compiler"]["program"] is None
    broken = tmp_path / "g++"
    broken.write_text("no program")
    broken.chmod(0o755)
    monkeypatch.delenv("CXX")
    lines, notes = machine.compilers(report)
    assert lines == [f"C++ compiler: {broken} (does not start)"]


def test_places_that_cannot_be_written_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    report: dict[str, Any] = {}
    lines, notes = machine.disks(report)
    said = [text for text in texts(notes) if "GB of disk" not in text]
    assert said[0] == "fault: the folder runs: runs is a file, not a folder: name another place by --run_dir"
    assert said[1].startswith("hint: the folder /proc/none/pfl_ext cannot be written")
    assert said[1].endswith("set XDG_CACHE_HOME to a folder of your own")
    assert [name for name, entry in report["disk"].items() if not entry["writable"]] == ["runs", "cache"]
    assert sum("nothing can be written there" in line for line in lines) == 2


def test_little_memory_and_disk_are_hints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "memory_gb", lambda: (1.0, 8.0))
    monkeypatch.setattr(machine, "DISK_GB", 1e9)
    assert texts(machine.hardware({})[1])[0].startswith("hint: only 1.0 GB of memory are free")
    assert sum("GB of disk are free" in text for text in texts(machine.disks({})[1])) == 2
    monkeypatch.setattr(machine, "memory_gb", lambda: (0.0, 0.0))
    lines, notes = machine.hardware({})
    assert (lines[1], notes) == ("memory: unknown", [])


@pytest.mark.parametrize(
    ("more", "driver", "said"),
    [
        ({}, ["H200, 140 GB, 590"], ""),
        ({"gpus": []}, [], ""),
        (
            {"gpus": [], "why_no_gpu": "RuntimeError: the driver is too old"},
            ["H200"],
            "fault: torch cannot use the GPU (RuntimeError: the driver is too old): update the driver to one "
            "for CUDA 13.2",
        ),
        ({"gpus": [], "cuda": None}, ["H200"], "fault: torch cannot use the GPU (no CUDA): install one with"),
        (
            {"gpus": [{**GPU, "works": False, "why": "RuntimeError: no kernel image"}]},
            ["H200"],
            "fault: cuda:0 (H200) does not compute (RuntimeError: no kernel image): see nvidia-smi",
        ),
        ({"gpus": [{**GPU, "free_gb": 1.0}]}, ["H200"], "hint: more than half of cuda:0 is in use"),
        ({"gpus": [GPU, GPU], "nccl": None}, ["H200"], "hint: torch has no NCCL"),
    ],
)
def test_gpus(more: dict[str, Any], driver: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines, notes = findings.device({**SEEN, **more}, {"driver": driver})
    assert lines[0].startswith("GPUs for torch, which is built for ")
    assert len(lines) == 1 + len(more.get("gpus", [GPU]))
    assert len(notes) == bool(said)
    assert not notes or str(notes[0]).startswith(said)


def test_a_gpu_that_a_variable_hides_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, notes = findings.device({**SEEN, "gpus": []}, {"driver": ["H200"]})
    assert texts(notes) == ["hint: CUDA_VISIBLE_DEVICES hides the GPU from runs: unset it"]


def test_the_way_of_a_run_on_gpus_is_said() -> None:
    lines, notes = findings.path(ON_GPU, {"device": {**SEEN, "gpus": [GPU, GPU]}})
    text = "\n".join(lines)
    assert notes == []
    assert "device: cuda:0" in text
    assert "4 lanes (streams)" in text
    assert "CUDA graphs: yes" in text
    assert "NP=2 starts one for each GPU" in text


@pytest.mark.parametrize(("why", "writable", "hints"), [
    ("g++ failed: error", True, 1), ("g++ failed: error", False, 0), ("no C++ compiler was found", True, 0),
])  # fmt: skip
def test_one_reason_is_said_once(why: str, writable: bool, hints: int) -> None:
    facts = {**ON_GPU, "on_gpu": False, "device": "cpu", "compiled": False, "why": why}
    lines, notes = findings.path(facts, {"disk": {"cache": {"writable": writable}}})
    assert f"compiled layers: no, torch's own, which are slower: {why}" in lines
    assert len(notes) == hints


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, 0),
        ({"path": 1, "failures": [{"path": 0, "why": "off by more", "deviation": 1.0}]}, 1),
        ({"path": 4, "holds": False, "failures": [{"path": 3, "why": "by nan", "deviation": None}]}, 2),
        ({"left_out": True}, 1),
    ],
)
def test_what_the_self_test_says(more: dict[str, Any], said: int) -> None:
    lines, notes = findings.trial({**HELD, **more})
    assert len(lines) == 1
    assert [note.is_fault for note in notes] == [[], [False], [True]][said]


def test_each_stage_that_does_not_end_is_named_with_a_remedy() -> None:
    for stage in findings.DOING:
        note = findings.ended(stage, "it did not end within 60 s", ["", "a last line", " "])
        assert note.is_fault
        assert findings.DOING[stage] in note.text
        assert "; its last line: a last line: " in note.text
        assert findings.failed({"failed": stage, "why": "E: x"})[1][0].is_fault
    assert "the project cannot be imported" in str(
        findings.failed({"failed": "benchmarks.flair.train", "why": "E: x"})[1][0]
    )


def test_horovod_that_cannot_be_imported_and_one_without_nccl() -> None:
    _, (note,) = findings.horovod({"why": "ImportError: undefined symbol"}, {})
    assert str(note).startswith("fault: Horovod cannot be imported (ImportError: undefined symbol)")
    facts = {"version": "0.28.1", "built_with": ["gloo"]}
    assert findings.horovod(facts, {})[1] == []
    _, (note,) = findings.horovod(facts, {"device": {"gpus": [GPU, GPU]}})
    assert str(note).startswith("hint: Horovod was built without NCCL")


@pytest.mark.parametrize(
    ("faults", "hints", "line"),
    [
        (0, 0, "all is well"),
        (0, 1, "all is well; the hint above would make it better"),
        (0, 2, "all is well; the 2 hints above would make it better"),
        (1, 3, "not well: repair the fault named above"),
        (2, 0, "not well: repair the 2 faults named above"),
    ],
)
def test_the_last_line(faults: int, hints: int, line: str) -> None:
    assert verdict(faults, hints) == line


def test_notes_say_of_themselves_what_they_are() -> None:
    assert [str(fault("x")), str(hint("y"))] == ["fault: x", "hint: y"]


def test_a_child_that_lives_on_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "process"
    source = (
        "import subprocess, time\n"
        "other = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(noted)!r}, 'w').write(str(other.pid))\n"
        "time.sleep(60)\n"
    )
    put_module(tmp_path, "numpy", source, monkeypatch)
    seen: list[Any] = []
    answer = ask(("imports",), seen.append, {**SECONDS, "imports": 6.0})
    assert answer == Answer("imports", "it did not end within 6 s", answer.output)
    assert seen == [{"stage": "imports", "event": "begin"}]
    state = Path(f"/proc/{noted.read_text()}/stat")
    deadline = time.monotonic() + 30
    while lives(state) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(state)


def lives(state: Path) -> bool:
    """Whether the process of this ``stat`` file lives; a zombie, which nobody has waited for, does not."""
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
