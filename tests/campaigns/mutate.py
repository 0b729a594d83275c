"""One-line faults in the modules that decide numbers or guarantees: do their tests fail?

    pip install cosmic-ray==8.7.0
    python -m tests.campaigns.mutate --sample 200 [--seed 0] [--state mutate.jsonl] [--only checkpoint]

A sample of all faults (`tests.campaigns.mutants`) is put, one at a time, into a copy of the working tree,
where the test files of `TESTS` run until the first failure, the quick tests of a file first. A fault is
caught when a test fails, or takes longer than it may; that test must pass without the fault. Each trial is
a fork of the campaign, which has torch and the other libraries loaded already. With ``--state`` the same
command goes on where it was broken off; a fault that lived is tried again once a test file of its module
has changed.

What lived is printed with the argument that ``mutants.yaml`` has for it. Exit code 1: less than 95 % of the
faults that anybody could see were caught, or a fault lived for which there is no argument.
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
from typing import Any

import pytest
import torch
import yaml

from tests.campaigns.mutants import Mutant, digest, mutants, places

ROOT = Path(__file__).parents[2]
ARGUED = Path(__file__).with_name("mutants.yaml")
ENOUGH = 0.95
SLOW, HANGS = 150, 300
"""Seconds after which a test has failed, and after which its process is killed, if a thread runs on."""
MEMORY = 16 << 30  # bytes beyond what a trial starts with
CAME, LAST = ".came.json", ".last"
"""What became of the tests; a file that each test touches at its end."""
LOADED = (
    "torch", "torchvision", "pfl.model.pytorch", "pfl.algorithm.scaffold", "pfl.algorithm.fedprox", "h5py",
    "hypothesis", "scipy.stats", "scipy.optimize", "pyarrow.parquet", "sklearn.metrics", "dp_accounting",
    "PIL.Image", "pydantic", "safetensors.torch", "huggingface_hub", "matplotlib.figure", "optuna", "tqdm",
)  # fmt: skip
OURS = ("tests", "benchmarks", "dataset", "pfl_ext")

_ENGINE = ("engine/test_parts", "engine/test_engine", "privacy/test_engine_privately")
_PFL_EXT: Mapping[str, Sequence[str]] = {
    "tasks/single_label": ["tasks/test_single_label", "algorithms/test_fedir"],
    "backend": ["test_backend", "engine/test_engine", "algorithms/test_scaffold", "workers/test_distributed"],
    "checkpoint": ["test_checkpoint", "test_small_parts"],
    "evaluation": ["tasks/test_single_label", "test_backend"],
    "data/federated_dataset": ["data/test_federated_dataset", "data/test_fedvc", "test_backend"],
    "algorithms/fedir": ["algorithms/test_fedir"],
    "algorithms/fednova": ["algorithms/test_fednova"],
    "tasks/multi_label_scores": ["tasks/test_multi_label_scores", "tasks/test_ranking_device"],
    "models/weights": ["models/test_models"],
    "models/classifier": ["models/test_models", "models/test_small_models"],
    "tasks/multi_label": ["tasks/test_tasks", "tasks/test_single_label", "engine/test_engine"],
    "algorithms/optimizers": ["algorithms/test_optimizers"],
    "algorithms/per_user": ["algorithms/test_per_user"],
    "privacy/central": ["privacy/test_central", "privacy/test_engine_privately", "privacy/test_local"],
    "privacy/accounting": ["privacy/test_accounting", "privacy/test_central"],
    "privacy/banded": ["privacy/test_banded"],
    "privacy/epsilon": ["privacy/test_accounting", "privacy/test_banded"],
    "privacy/local": ["privacy/test_local"],
    "privacy/mechanisms": [
        "privacy/test_mechanisms",
        "privacy/test_central",
        "privacy/test_engine_privately",
    ],
    "privacy/sampling": ["data/test_federated_dataset", "privacy/test_accounting"],
    "randomness": ["test_small_parts", "data/test_federated_dataset"],
    "tasks/ranking": ["tasks/test_multi_label_scores", "tasks/test_ranking_device"],
    "data/schedule": ["data/test_schedule", "data/test_federated_dataset"],
    "models/small": ["models/test_small_models"],
    "data/transforms": ["data/test_transforms"],
    "workers/transport": ["workers/test_distributed"],
    "engine/cohort": [*_ENGINE, "algorithms/test_scaffold", "engine/test_on_card"],
    "engine/gradients": [*_ENGINE, "engine/test_sensitivity"],
    "engine/lane": [*_ENGINE, "algorithms/test_scaffold", "engine/test_on_card"],
    "engine/one_step": _ENGINE,
    "engine/tape": _ENGINE,
    "engine/training": [*_ENGINE, "algorithms/test_local_sgd", "algorithms/test_optimizers"],
    "engine/trim": _ENGINE,
}
_DATASET: Mapping[str, Sequence[str]] = {
    "partitions/dirichlet": ["partitions/test_dirichlet"],
    "partitions/geo": ["partitions/test_geo"],
    "partitions/statistics": ["partitions/test_statistics", "partitions/test_dirichlet"],
    "store/columns": ["store/test_hostile", "fetch/test_sources", "flair/test_download_preprocess"],
    "store/images": ["store/test_hdf5", "store/test_hostile", "store/test_transcode"],
    "store/index": ["store/test_hdf5", "store/test_validate", "partitions/test_dirichlet"],
    "journal": ["test_resume"],
    "store/native": ["store/test_hdf5", "store/test_validate", "store/test_hostile"],
    "store/validate": ["store/test_validate", "store/test_hdf5"],
    "store/writer": [
        "store/test_hdf5",
        "store/test_annotations",
        "test_resume",
        "flair/test_download_preprocess",
    ],
}
_BENCHMARKS: Mapping[str, Sequence[str]] = {
    "core/ledger": ["core/test_private"],
    "core/recorder": ["core/test_recorder", "test_train", "core/test_faults"],
    "core/run_directory": ["core/test_recorder", "core/test_faults"],
    "core/secret": ["core/test_secret", "core/test_private"],
}
TESTS = {
    f"{root}/{module}.py": [f"tests/{root}/{name}.py" for name in names]
    for root, of_root in (("pfl_ext", _PFL_EXT), ("dataset", _DATASET), ("benchmarks", _BENCHMARKS))
    for module, names in of_root.items()
}
"""The test files of each module, the module's own before those that it takes part in."""


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
    tests: str  # SHA-256 of its test files
    outcome: str
    by: str
    seconds: float

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What identifies the mutant."""
        return self.module, self.operator, self.occurrence, self.source


class _Quickest:
    """A plugin of pytest: the tests of each file run from the quickest to the slowest; what came is kept."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._known = seconds
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = list(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: (files.index(item.path), self._known.get(item.nodeid, 0.0)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        Path(LAST).touch()
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        Path(CAME).write_text(json.dumps({"seconds": self._seconds, "failed": self._failed}))


class Tree:
    """A copy of the working tree, without what git ignores, where tests run."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._seconds: dict[str, float] = {}  # of each test, when it ran last
        self._passing: set[str] = set()  # tests that pass without a fault
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, place / name)
        compileall.compile_dir(place, quiet=2)

    def tried(self, mutant: Mutant) -> Trial:
        """Put a fault in, run the tests of its module, take it out.

        Raises ValueError if the test that failed fails without the fault, too.
        """
        path, started = self.place / mutant.module, time.monotonic()
        sound, of_file = path.read_bytes(), path.stat()
        path.write_text(mutant.code)
        code, failed, said = self._tested(TESTS[mutant.module], keep_bytecode=False)
        path.write_bytes(sound)
        os.utime(path, ns=(of_file.st_atime_ns, of_file.st_mtime_ns))  # by which Python knows its bytecode
        seconds = time.monotonic() - started
        if code != 0:
            self._must_pass(failed[:1] or TESTS[mutant.module])
        return Trial(
            **{name: value for name, value in asdict(mutant).items() if name != "code"},
            source=digest(self.place, [mutant.module]),
            tests=digest(self.place, TESTS[mutant.module]),
            outcome="time" if code is None or "Failed: Timeout" in said else "caught" if code else "lived",
            by=failed[0] if failed else f"exit code {code}",
            seconds=round(seconds, 1),
        )

    def _must_pass(self, tests: Sequence[str]) -> None:
        for test in tests:
            if test not in self._passing:
                code, _, said = self._tested([test])
                if code != 0:
                    raise ValueError(f"{test} fails without a fault: repair it first\n{said[-3000:]}")
                self._passing.add(test)

    def _tested(self, tests: Sequence[str], keep_bytecode: bool = True) -> tuple[int | None, list[str], str]:
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
            came: dict[str, Any] = {"seconds": {}, "failed": []}
            if (self.place / CAME).exists():  # a child that was killed leaves none
                came = json.loads((self.place / CAME).read_text())
            self._seconds |= came["seconds"]
            return os.waitstatus_to_exitcode(status) if ended else None, came["failed"], said.read()

    def _run(self, tests: Sequence[str], output: int, keep_bytecode: bool) -> None:
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
            order = _Quickest(self._seconds)
            options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--durations=0"]
            options.append(f"--timeout={SLOW}")
            code = int(pytest.main([*options, *tests], plugins=[order]))
        finally:
            os._exit(code)


def known(state: Path | None) -> dict[tuple[str, str, int, str], Trial]:
    """Trials of earlier lives of the campaign that still count."""
    if state is None or not state.exists():
        return {}
    trials = [Trial(**json.loads(line)) for line in state.read_text().splitlines()]
    return {
        t.key: t
        for t in trials
        if t.module in TESTS and (t.outcome != "lived" or t.tests == digest(ROOT, TESTS[t.module]))
    }


def campaign(sample: int, seed: int, only: str, state: Path | None) -> tuple[list[Trial], str]:
    """The trials of a sample, and what it is drawn from."""
    sources = {module: (ROOT / module).read_text() for module in TESTS if only in module}
    where = places(sources)
    chosen = list(islice(mutants(sources, where, seed), sample))
    old = known(state)
    keys = [(m.module, m.operator, m.occurrence, digest(ROOT, [m.module])) for m in chosen]
    new = [m for m, key in zip(chosen, keys) if key not in old]
    with tempfile.TemporaryDirectory() as place:
        tree = Tree(Path(place))
        for number, mutant in enumerate(new, 1):
            trial = tree.tried(mutant)
            old[trial.key] = trial
            here = f"{number} of {len(new)}: {mutant.module}:{mutant.line}"
            print(f"{here} {trial.outcome} ({trial.seconds} s) {trial.by}", file=sys.stderr, flush=True)
            if state is not None:
                with state.open("a") as file:
                    file.write(json.dumps(asdict(trial)) + "\n")
    return [old[key] for key in keys], f"{len(where)} places in {len(sources)} modules"


def argument(trial: Trial) -> str | None:
    """Why nobody can see this fault, in ``mutants.yaml``."""
    entries = yaml.safe_load(ARGUED.read_text()).get(trial.module, [])
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
    parser.add_argument("--sample", type=int, default=200, help="so many faults (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--state", type=Path, help="a file by which the same command goes on")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in LOADED:
        importlib.import_module(name)
    text, enough = report(*campaign(given.sample, given.seed, given.only, given.state))
    print(text)
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
