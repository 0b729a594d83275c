"""One thread for torch, because the tests' steps are small; and what the tests cost in CPU time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from itertools import islice

import pytest
import torch

torch.set_num_threads(1)
CPU_SECONDS = "cpu seconds"
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times",
        type=int,
        default=0,
        metavar="N",
        help="list the N tests and files that used the most CPU time, their child processes included",
    )


def cpu_seconds() -> float:
    """CPU time of this process and of the child processes that have ended."""
    return sum(os.times()[:4])


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
    if not most:
        return
    tests: dict[str, float] = {}
    files: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, seconds in getattr(report, "user_properties", ()):
                if name == CPU_SECONDS and report.when == "teardown":
                    tests[report.nodeid] = seconds
                    files[report.nodeid.split("::")[0]] += seconds
    terminalreporter.section(f"CPU time: {sum(tests.values()):.0f} s")
    for table in (files, tests):
        for name, seconds in islice(sorted(table.items(), key=lambda row: -row[1]), most):
            terminalreporter.line(f"{seconds:8.2f} s  {name}")
        terminalreporter.line("")
