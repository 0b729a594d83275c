"""One-line faults in the modules that decide numbers or guarantees: do the tests fail?

    pip install cosmic-ray==8.7.0 pytest-cov==7.1.0
    python -m tests.campaigns.mutate FOLDER --sample 200 [--seed 0] [--only checkpoint]

A sample of all faults (`tests.campaigns.mutants`) is put, one at a time, into a copy of the working tree,
where the tests that execute its line (`tests.campaigns.judges`) run until the first failure: those of the
module's own test file first, then others from the quickest to the slowest, of ``--seconds`` of CPU time
together. A fault is caught when a test fails, or takes longer than it may; that test must pass without the
fault. A fault that only a slower test or a new process would see counts as one that lived. Each trial is a
fork of the campaign, which has torch and the other libraries loaded already.

``FOLDER`` holds who executes which line, collected once by a run of the whole suite, and all trials: the same
command goes on where it was broken off. A fault that lived is tried again once one of its test files has
changed, unless ``mutants.yaml`` has an argument for it.

What lived is printed with that argument. Exit code 1: less than 95 % of the faults that anybody could see
were caught, or a fault lived for which there is no argument.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml

from tests.campaigns.judges import COVERAGE, Judgement, Judges, collect
from tests.campaigns.mutants import Mutant, digest, mutants, places

ROOT = Path(__file__).parents[2]
ARGUED = Path(__file__).with_name("mutants.yaml")
ANY = "any module"
ENOUGH = 0.95
WAITS, SLOWER, HANGS = 40, 5, 300
"""A test fails after 40 s and five times its CPU time; its process is killed 300 s after its last test."""
TRIALS = "trials.jsonl"
MEMORY = 16 << 30  # bytes beyond what a trial starts with
CAME, LAST = ".came.json", ".last"
"""What failed; a file that each test touches at its end."""
PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
LOADED = (
    "torch", "torchvision", "pfl.model.pytorch", "pfl.algorithm.scaffold", "pfl.algorithm.fedprox", "h5py",
    "hypothesis", "scipy.stats", "scipy.optimize", "pyarrow.parquet", "sklearn.metrics", "dp_accounting",
    "PIL.Image", "pydantic", "safetensors.torch", "huggingface_hub", "matplotlib.figure", "optuna", "tqdm",
)  # fmt: skip
OURS = ("tests", "benchmarks", "dataset", "pfl_ext")

_FOLDERS = (
    "pfl_ext pfl_ext/aggregation pfl_ext/algorithms pfl_ext/attacks pfl_ext/auditing pfl_ext/compression "
    "pfl_ext/data pfl_ext/devices pfl_ext/models pfl_ext/privacy pfl_ext/tasks pfl_ext/workers "
    "dataset/partitions dataset/store"
)
_MODULES = {
    "pfl_ext/engine": "card cohort gradients graphs lane norms one_step plan pool selfcheck tape "
    "training trim",
    "pfl_ext/engine/cpu": "convolutions crops dense depthwise narrow twin",
    "dataset": "files journal",
    "dataset/fetch": "annotated coco members voc",
    "dataset/sbd": "matlab",
    "benchmarks/core": "federated ledger privacy_statement recorder run_directory secret",
    "benchmarks/core/config": "digests effects privacy_rules",
}
MODULES = [
    *(
        f"{folder}/{path.name}"
        for folder in _FOLDERS.split()
        for path in sorted((ROOT / folder).glob("*.py"))
    ),
    *(f"{folder}/{name}.py" for folder, names in _MODULES.items() for name in names.split(" ")),
]
"""Those that decide numbers or guarantees."""


Key = tuple[str, str, int, str]


@dataclass(frozen=True)
class Trial:
    """What became of a mutant: ``caught`` by a test, by ``time``, or it ``lived``."""

    module: str
    operator: str
    occurrence: int
    line: int
    was: str
    now: str
    source: str  # SHA-256 of the module
    tests: str  # SHA-256 of the test files
    outcome: str
    by: str
    seconds: float

    @property
    def key(self) -> Key:
        """What identifies the mutant."""
        return self.module, self.operator, self.occurrence, self.source


class _Chosen:
    """A plugin of pytest: the tests of a judgement run, from a file's quickest; what failed is kept."""

    def __init__(self, judgement: Judgement, known: Mapping[str, float]) -> None:
        self._judgement, self._known = judgement, known
        self._failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen, whole = self._judgement.seconds, self._judgement.whole
        items[:] = [
            item
            for item in items
            if item.nodeid in chosen
            or (item.nodeid not in self._known and item.nodeid.partition("::")[0] in whole)
        ]
        files = list(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: (files.index(item.path), self._known.get(item.nodeid, 0.0)))
        for item in items:
            item.add_marker(pytest.mark.timeout(WAITS + SLOWER * self._known.get(item.nodeid, 0.0)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        Path(LAST).touch()
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        Path(CAME).write_text(json.dumps(self._failed))


class Tree:
    """A copy of the working tree, without what git ignores, where tests run.

    ``seconds``: of CPU time that each test uses.
    """

    def __init__(self, place: Path, seconds: Mapping[str, float]) -> None:
        self.place, self._seconds = place, seconds
        self._sound: set[str] = set()  # tests that pass without a fault
        self._unsound: set[str] = set()  # tests that do not
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, place / name)
        compileall.compile_dir(place, quiet=2)

    def tried(self, mutant: Mutant, judgement: Judgement) -> Trial:
        """Put a fault in, run the tests that judge it, take it out."""
        started, outcome, by = time.monotonic(), "lived", ""
        for stage in judgement.stages(mutant.module):
            outcome, by = self._judged(mutant, stage)
            if outcome != "lived":
                break
        return Trial(
            **{name: value for name, value in asdict(mutant).items() if name != "code"},
            source=digest(self.place, [mutant.module]),
            tests=digest(self.place, judgement.files),
            outcome=outcome,
            by=by,
            seconds=round(time.monotonic() - started, 1),
        )

    def _judged(self, mutant: Mutant, tests: Judgement) -> tuple[str, str]:
        """What becomes of a mutant, and by which test; one that fails without the fault does not count."""
        path = self.place / mutant.module
        sound, of_file = path.read_bytes(), path.stat()
        while (tests := tests.without(self._unsound)).files:
            path.write_text(mutant.code)
            code, failed, said = self._tested(tests, keep_bytecode=False)
            path.write_bytes(sound)
            # Python knows bytecode by its module's time.
            os.utime(path, ns=(of_file.st_atime_ns, of_file.st_mtime_ns))
            if code in PASSED:
                return "lived", ""
            if self._pass(Judgement({failed[0]: 0.0}) if failed else tests):
                late = code is None or "Failed: Timeout" in said
                return "time" if late else "caught", failed[0] if failed else f"exit code {code}"
            print(f"without a fault, this fails, too: {failed[:1] or tests.files}", file=sys.stderr)
            if not failed:
                break
            self._unsound.add(failed[0])
        return "lived", ""

    def _pass(self, tests: Judgement) -> bool:
        """Whether tests pass without a fault."""
        if not tests.seconds.keys() <= self._sound or tests.whole:
            if self._tested(tests)[0] not in PASSED:
                return False
            self._sound |= tests.seconds.keys()
        return True

    def _tested(self, tests: Judgement, keep_bytecode: bool = True) -> tuple[int | None, list[str], str]:
        """Run tests until the first failure: pytest's exit code (None: it hung), the failure, the output."""
        (self.place / CAME).unlink(missing_ok=True)
        (self.place / LAST).touch()
        shutil.rmtree(self.place / ".hypothesis", ignore_errors=True)
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if not child:
                self._run(tests, said.fileno(), keep_bytecode)
            ended, status = 0, 0
            while not ended and time.time() < (self.place / LAST).stat().st_mtime + HANGS:
                ended, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # with the processes that its tests started
            if not ended:
                os.waitpid(child, 0)
            said.seek(0)
            came = self.place / CAME  # a child that was killed leaves none
            failed = json.loads(came.read_text()) if came.exists() else []
            return os.waitstatus_to_exitcode(status) if ended else None, failed, said.read()

    def _run(self, tests: Judgement, output: int, keep_bytecode: bool) -> None:
        """In the child; does not return."""
        code = 99
        try:
            os.setsid()
            for stream in (1, 2):
                os.dup2(output, stream)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            os.chdir(self.place)
            sys.path[0] = str(self.place)
            if not keep_bytecode:
                sys.dont_write_bytecode = True
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
                del sys.modules[name]
            importlib.invalidate_caches()
            options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
            code = int(pytest.main([*options, *tests.files], plugins=[_Chosen(tests, self._seconds)]))
        finally:
            os._exit(code)


def campaign(folder: Path, sample: int, seed: int, only: str, seconds: float) -> tuple[list[Trial], str]:
    """The trials of a sample, and what it is drawn from."""
    if not (folder / COVERAGE).exists():
        collect(ROOT, folder)
    judges = Judges(ROOT, folder)
    sources = {module: (ROOT / module).read_text() for module in MODULES if only in module}
    where = places(sources)
    chosen = list(islice(mutants(sources, where, seed), sample))
    judgements = [judges.of(mutant.module, mutant.line, seconds) for mutant in chosen]
    keys = [(m.module, m.operator, m.occurrence, digest(ROOT, [m.module])) for m in chosen]
    trials = [Trial(**json.loads(line)) for line in _lines(folder / TRIALS)]
    old = {trial.key: trial for trial in trials}

    def is_new(key: Key, judgement: Judgement) -> bool:
        trial = old.get(key)
        return trial is None or (
            trial.outcome == "lived"
            and trial.tests != digest(ROOT, judgement.files)
            and argument(trial) is None
        )

    new = [(m, of) for m, key, of in zip(chosen, keys, judgements) if is_new(key, of)]
    with tempfile.TemporaryDirectory() as place:
        tree = Tree(Path(place), judges.seconds)
        for number, (mutant, judgement) in enumerate(new, 1):
            trial = tree.tried(mutant, judgement)
            old[trial.key] = trial
            here = f"{number} of {len(new)}: {mutant.module}:{mutant.line}"
            print(f"{here} {trial.outcome} ({trial.seconds} s) {trial.by}", file=sys.stderr, flush=True)
            with (folder / TRIALS).open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
    return [old[key] for key in keys], f"{len(where)} places in {len(sources)} modules"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def argument(trial: Trial) -> str | None:
    """Why nobody can see this fault, in ``mutants.yaml``."""
    argued = yaml.safe_load(ARGUED.read_text())
    entries = [*argued.get(trial.module, []), *argued[ANY]]
    return next((str(e["why"]) for e in entries if (e["was"], e["now"]) == (trial.was, trial.now)), None)


def report(trials: Sequence[Trial], drawn_from: str) -> tuple[str, bool]:
    """What is printed at the end, and whether it is enough."""
    lived = [t for t in trials if t.outcome == "lived"]
    unseen = [t for t in lived if argument(t) is not None]
    seen = len(trials) - len(unseen)
    caught = len(trials) - len(lived)
    by_module: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_module[trial.module].append(trial)
    lines = [
        f"{module}: {sum(t.outcome != 'lived' for t in of)} of {len(of)} caught"
        for module, of in sorted(by_module.items())
    ]
    for trial in lived:
        lines += [
            f"LIVED {trial.module}:{trial.line} {trial.operator.removeprefix('core/')}",
            f"    - {trial.was}",
            f"    + {trial.now}",
            f"    {argument(trial) or 'NOT ARGUED'}",
        ]
    hung = sum(t.outcome == "time" for t in trials)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    share, share_seen = caught / max(len(trials), 1), caught / max(seen, 1)
    lines += [
        f"{caught} of {len(trials)} faults caught ({share:.1%}; {hung} of them by time), "
        f"drawn from {drawn_from} at {commit.stdout.strip()}",
        f"{len(unseen)} of those that lived cannot be seen; of the others {caught} of {seen} are caught "
        f"({share_seen:.1%})",
    ]
    return "\n".join(lines), caught >= ENOUGH * seen and len(unseen) == len(lived)


def main() -> int:
    """Run the campaign and say what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="what the same command goes on from")
    parser.add_argument("--sample", type=int, default=200, help="so many faults (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument(
        "--seconds", type=float, default=120, help="CPU time of a fault's tests together (120)"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in LOADED:
        importlib.import_module(name)
    text, enough = report(*campaign(given.folder, given.sample, given.seed, given.only, given.seconds))
    print(text)
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
