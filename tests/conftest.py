"""For all tests: one thread for torch, no time limit of examples, an event loop, and a test's CPU time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import sys
from collections import defaultdict
from collections.abc import Generator
from itertools import islice
from pathlib import Path

import hypothesis
import pytest
from _pytest.unraisableexception import gc_collect_iterations_key

import benchmarks as benchmarks  # before numpy and torch: it sets what their libraries read at their start
from dataset.store.probe import _dies_of as REAL_DIES_OF
from tests import warm
from tests.campaigns.probe_server import ProbeServer
from tests.launching import fresh_environment

hypothesis.settings.register_profile(
    "slow machines", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("slow machines")
CPU_SECONDS = "cpu seconds"
SLOW_LIST = Path(__file__).parent / "slow.txt"
"""Tests that use over `SLOW_SECONDS` of CPU time with all their parameters; FAST=1 leaves them out."""
SLOW_SECONDS = 0.5
FROZEN, MODULES = list[int](), 50
"""How many modules were imported at each `freeze`, and so many more call for the next."""
STARTED = pytest.StashKey[float]()
LOOP = asyncio.new_event_loop()
gc.disable()  # until all tests are imported (`freeze`): half of that time would go into searches for garbage
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait do not spin: others need the cores
os.fsync = os.fstat  # type: ignore[assignment]  # no machine fails here, and a run waits for its disk 20 times


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """pfl's loop runs in the current event loop, which ``asyncio.run`` in an earlier test has taken away."""
    asyncio.set_event_loop(LOOP)


@pytest.fixture(scope="session", autouse=True)
def probes() -> Generator[ProbeServer, None, None]:
    """A data file is probed in a fork of one small process, not by an interpreter of its own each time."""
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(ProbeServer()) as server:
        patch.setattr("dataset.store.probe._dies_of", server.dies_of)
        yield server


@pytest.fixture
def real_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users' files are probed."""
    monkeypatch.setattr("dataset.store.probe._dies_of", REAL_DIES_OF)


def pytest_configure(config: pytest.Config) -> None:
    """xdist's workers share one server (`warm`), which ends with the process that they ended with.

    At the end pytest collects garbage five times, for other interpreters. CPython's first collection finds
    all of it, and each takes half a second and more.
    """
    config.stash[gc_collect_iterations_key] = 1
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[warm.SERVER] = warm.server(fresh_environment())


def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: one more than cores, since tests of lost workers and of servers wait a lot."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_sessionfinish() -> None:
    LOOP.close()
    gc.unfreeze()  # or libraries report what is left at the end as leaks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times",
        type=int,
        default=0,
        metavar="N",
        help="list the N tests and files that used the most CPU time, their child processes included",
    )
    parser.addoption(
        "--write-slow",
        action="store_true",
        help=f"run all tests; list in {SLOW_LIST.name} those that use over {SLOW_SECONDS:g} s of CPU time",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One thread for torch, and marks the tests of `SLOW_LIST` as slow, whatever their parameters."""
    import torch  # takes seconds, and xdist's controller runs no test

    torch.set_num_threads(1)
    listed = set(SLOW_LIST.read_text().split())
    for item in items:
        if function_of(item.nodeid) in listed:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    freeze()


def freeze() -> None:
    """What is imported by now stays: each full collection of garbage would look through it, for a second."""
    gc.collect()
    gc.freeze()
    gc.enable()
    FROZEN.append(len(sys.modules))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Between files, when their fixtures are gone, what tests have imported is frozen, too."""
    yield
    if nextitem is not None and nextitem.path != item.path and len(sys.modules) > FROZEN[-1] + MODULES:
        freeze()


def function_of(nodeid: str) -> str:
    """The name of a test without its parameters, and without the group that xdist appends."""
    return re.split(r"[\[@]", nodeid)[0]


def cpu_seconds() -> float:
    """CPU time of this process, of its ended child processes, and of those that `warm` ran for it."""
    return sum(os.times()[:4]) + warm.cpu_seconds()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Each test knows its CPU time: it does not depend on what else the machine does."""
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append((CPU_SECONDS, cpu_seconds() - item.stash[STARTED]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    most = config.getoption("--cpu-times")
    tests: dict[str, float] = {}
    files: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, seconds in getattr(report, "user_properties", ()):
                if name == CPU_SECONDS and report.when == "teardown":
                    tests[report.nodeid] = seconds
                    files[report.nodeid.split("::")[0]] += seconds
    if config.getoption("--write-slow"):
        functions: dict[str, float] = defaultdict(float)
        for nodeid, seconds in tests.items():
            functions[function_of(nodeid)] += seconds
        slow = sorted(name for name, seconds in functions.items() if seconds > SLOW_SECONDS)
        SLOW_LIST.write_text("".join(f"{name}\n" for name in slow))
    if not most:
        return
    terminalreporter.section(f"CPU time: {sum(tests.values()):.0f} s")
    for table in (files, tests):
        for name, seconds in islice(sorted(table.items(), key=lambda row: -row[1]), most):
            terminalreporter.line(f"{seconds:8.2f} s  {name}")
        terminalreporter.line("")
