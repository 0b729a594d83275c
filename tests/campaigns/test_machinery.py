"""The campaigns see what they are meant to see."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.flair.config import parse
from dataset import files
from tests.campaigns import fuzz, kill_training, kill_workers
from tests.campaigns.kinds import KINDS
from tests.campaigns.lives import START, After, At, Phases, found, live
from tests.campaigns.probe_server import ProbeServer
from tests.campaigns.readers import targets
from tests.campaigns.target import Target


def endless(_: Path) -> object:
    while True:
        time.sleep(1)


def crash(_: Path) -> object:
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def two_lines(_: Path) -> object:
    print("error: one", file=sys.stderr)
    raise ValueError("two")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "defect": (lambda path: dict[Path, object]()[path], "KeyError"),
    "greed": (lambda _: bytearray(3 << 30), "asks for more than 2 GB"),
    "misreading": (lambda path: path.read_bytes(), "read as"),
    "endless": (endless, "hang"),
    "crash": (crash, "crash"),
    "two lines": (two_lines, "exit code 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_way_to_fail_is_a_finding_and_the_batch_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "endless":  # the others end by themselves, however slow the machine is
        monkeypatch.setattr(fuzz, "SECONDS", 1.0)
    read, what = BAD[name]
    sound = [b"0123456789" * 20]
    target = Target(name, sound, read, same=name == "misreading")
    tally = fuzz.Tally(seed=3)
    for first in (0, 1):
        outcomes, peak = fuzz.batch(target, [first], tally.seed, tmp_path)
        tally.add(target, outcomes, peak, 1.0)
    assert tally.counts[name] == {"finding": 2}
    assert all(what in found for _, _, found in tally.findings)
    assert tally.done[name] == 2


def test_sound_inputs_are_read(tmp_path: Path) -> None:
    """Else all damage would be refused for another reason than the damage."""
    for target in targets(tmp_path):
        for sound in target.seeds:
            assert fuzz.judge(target, sound, tmp_path, None) == ("read", ""), target.name


def test_a_tally_goes_on_from_its_file(tmp_path: Path) -> None:
    tally = fuzz.Tally(seed=3)
    target = Target("t", [b"x"], len)  # type: ignore[arg-type]
    tally.add(target, [(0, "read", ""), (1, "finding", "why")], 10, 2.0)
    files.write_json(tmp_path / "state.json", vars(tally))
    assert fuzz.Tally.read(tmp_path / "state.json", 3) == tally
    with pytest.raises(ValueError, match="is of --seed 3"):
        fuzz.Tally.read(tmp_path / "state.json", 4)


def test_the_dead_are_counted_with_what_they_were_at(tmp_path: Path) -> None:
    names = {"outer": ("dataset.files:write_json",), "inner": ("dataset.files:write_bytes",)}
    phases = Phases(names)

    def work() -> int:
        files.write_json(tmp_path / "a.json", {})
        time.sleep(60)
        return 0

    def died(death: After | At) -> str:
        assert live(work, death, tmp_path / "log", phases) is None
        return phases.last

    assert died(At("dataset.files:write_json", 1, before=True)) == START
    assert died(At("json:dumps", 1, before=False)) == "outer"
    assert died(At("os:replace", 1, before=True)) == "inner"
    assert not (tmp_path / "a.json").exists()
    assert died(At("os:replace", 1, before=False)) == "inner"
    assert (tmp_path / "a.json").exists()
    assert died(After(0.5)) == START


def test_every_place_and_phase_is_a_function() -> None:
    places = [place for places in kill_training.PLACES.values() for place in places]
    places += kill_training.OF_SCAFFOLD
    places += [*kill_workers.OF_ANY_WORKER, *kill_workers.OF_WORKER_0]
    places += [place for phase in kill_workers.AT_WORK.values() for place in phase]
    for place in places:
        owner, name = found(place)
        assert callable(getattr(owner, name)), place


def test_the_kinds_are_what_they_are_called() -> None:
    momentum = parse(KINDS["momentum"]).config
    assert (momentum.server.optimizer, momentum.server.momentum) == ("sgd", 0.9)
    assert momentum.privacy is not None
    assert momentum.privacy.mechanism == "adaptive"
    paper = parse(KINDS["pfl"]).config
    assert (paper.server.optimizer, paper.privacy and paper.privacy.mechanism) == ("adam", "adaptive")


SOUND = '''
import math


def capped(values: list[int] | None, most: int = 3) -> int:
    """At most 3, and a - b."""
    assert most > 0
    if len(values) > most:
        raise ValueError(f"{len(values) + 1} are too many")
    return values[0]
'''


def test_a_fault_is_one_that_can_be_seen() -> None:
    """None in annotations, docstrings, assertions and messages; each changes one line and is drawn once."""
    pytest.importorskip("cosmic_ray")
    from tests.campaigns.mutants import Mutant, mutants, places

    def drawn(sources: dict[str, str]) -> list[Mutant]:
        return list(mutants(sources, places(sources), 0))

    found = drawn({"m.py": SOUND})
    assert sorted(m.now for m in found) == [
        "def capped(values: list[int] | None, most: int = 4) -> int:",
        "if len(values) >= most:",
        "if not len(values) > most:",
        "return values[ 1]",
    ]
    for mutant in found:
        different = [(a, b) for a, b in zip(SOUND.splitlines(), mutant.code.splitlines()) if a != b]
        assert [(a.strip(), b.strip()) for a, b in different] == [(mutant.was, mutant.now)]
        assert SOUND.splitlines()[mutant.line - 1].strip() == mutant.was
    assert drawn({"m.py": SOUND}) == found
    other = {"m.py": SOUND, "n.py": "x = 1\n"}
    assert [m for m in drawn(other) if m.module == "m.py"] == found
    longer = drawn({"m.py": f"x = 1{SOUND}"})
    assert [m.now for m in longer if m.was != "x = 1"] == [m.now for m in found]


def test_a_fault_is_judged_by_who_executes_its_line_or_what_is_around_it() -> None:
    pytest.importorskip("coverage")
    from tests.campaigns.judges import levels

    lines = SOUND.splitlines()
    line = {text: lines.index(whole) + 1 for whole in lines for text in [whole.strip()]}
    start, end = line['"""At most 3, and a - b."""'], line["return values[0]"]
    body = set(range(start, end + 1))
    tree = ast.parse(SOUND)
    at_import = line["def capped(values: list[int] | None, most: int = 3) -> int:"]
    assert list(levels(tree, at_import)) == [body, body]  # of the function, of the module
    condition = line["if len(values) > most:"]
    assert list(levels(tree, condition)) == [{condition}, body, body]


def test_the_quick_tests_of_the_own_file_come_before_all_others() -> None:
    pytest.importorskip("coverage")
    from tests.campaigns.judges import Judgement

    seconds = {
        "t.py::d": 0.1,
        "tests/test_m.py::a": 0.2,
        "tests/test_n.py::b": 7.0,
        "tests/test_n.py::c": 9.0,
    }
    first, second, third = Judgement(seconds, frozenset({"t.py"})).stages("pfl_ext/m.py")
    assert set(first.seconds) == {"tests/test_m.py::a", "t.py::d"}
    assert first.files == ["t.py", "tests/test_m.py"]
    assert (list(second.seconds), list(third.seconds)) == (["tests/test_n.py::b"], ["tests/test_n.py::c"])
    assert first.without({"t.py"}) == Judgement({"tests/test_m.py::a": 0.2})


def test_judges_are_found_where_lines_moved_and_tests_changed(tmp_path: Path) -> None:
    coverage = pytest.importorskip("coverage")
    from tests.campaigns.judges import COMMIT, COVERAGE, SECONDS, Judgement, Judges

    root, folder = tmp_path / "tree", tmp_path / "state"
    folder.mkdir()

    def write(name: str, text: str) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    def git(*words: str) -> str:
        by = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        return subprocess.run(
            ["git", *by, *words], cwd=root, check=True, capture_output=True, text=True
        ).stdout

    write("a/m.py", SOUND)
    for name in ("kept", "changed", "apart"):
        write(f"tests/test_{name}.py", "import a.m")
    write("tests/test_apart.py", "import a.m\n\n\ndef test(): a.m.x\n")
    write("tests/test_cached.py", "@functools.cache")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "as collected")
    (folder / COMMIT).write_text(git("rev-parse", "HEAD"))
    names = {"kept": 0.5, "changed": 0.2, "apart": 0.1, "cached": 3.0, "gone": 0.1}
    tests = {name: f"tests/test_{name}.py::test[x y]" for name in names}
    times = "".join(f"{seconds:8.2f} s  {tests[name]}\n" for name, seconds in names.items())
    (folder / SECONDS).write_text(times + "    9.00 s  tests/test_cached.py::test_other@group\n")
    data = coverage.CoverageData(str(folder / COVERAGE))
    start = SOUND.splitlines().index("    if len(values) > most:") + 1
    for name, lines in {
        "kept": [2, start],
        "cached": [start],
        "changed": [start + 2],
        "gone": [start],
    }.items():
        data.set_context(f"{tests[name]}|run")
        data.add_lines({"a/m.py": lines})
    data.write()

    write("a/m.py", f"x = 1\n{SOUND}")
    write("tests/test_changed.py", "import a.m  # and more")
    write("tests/test_new.py", "from a import m")
    write("tests/test_of_another.py", "from a import mm")
    whole = frozenset({"tests/test_changed.py", "tests/test_new.py"})
    other = "tests/test_cached.py::test_other"
    judges = Judges(root, folder)
    seconds = {tests["kept"]: 0.5, tests["cached"]: 3.0, tests["changed"]: 0.2, other: 9.0}
    assert judges.of("a/m.py", start + 1, 20) == Judgement(seconds, whole)
    del seconds[other]
    assert judges.of("a/m.py", start + 1, 12) == Judgement(seconds, whole)
    at_import = start + 1 - 3
    assert set(judges.of("a/m.py", at_import, 99).seconds) == {
        tests["kept"],
        tests["cached"],
        tests["changed"],
        other,
    }
    assert tests["apart"] in judges.of("a/m.py", 1, 99).seconds, "it executes nothing there"
    write("a/unseen.py", "y = 1\n")
    assert judges.of("a/unseen.py", 1, 99) == Judgement({})


def test_an_answer_that_nobody_read_is_not_that_of_the_next_file(tmp_path: Path) -> None:
    """A run that is killed while it asks is a fork of the process that asks later."""
    with contextlib.closing(ProbeServer()) as server:
        assert not server.dies_of(tmp_path / "none.hdf5")
        asked = server._server
        assert asked is not None
        assert asked.stdin is not None
        assert asked.stdout is not None
        print(0, tmp_path / "unread.hdf5", file=asked.stdin, flush=True)
        assert not server.dies_of(tmp_path / "none.hdf5")
        print(9, tmp_path / "last.hdf5", file=asked.stdin, flush=True)
        assert asked.stdout.readline() == "9 survived\n"
        child = os.fork()
        if child == 0:
            server.dies_of(tmp_path / "none.hdf5")
            os._exit(server._server is asked)
        assert os.waitpid(child, 0)[1] == 0, "it has a server of its own"
