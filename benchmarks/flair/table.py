"""Rows of runs over seeds, and their cells beside the paper's.

The paper's AP comes from 200 thresholds, so its AP columns are compared with ``C-AP-binned200`` and
``O-AP-binned200``; the exact ones stand beside them. Its numbers are means and standard deviations of five
seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.core.config.trees import Tree
from benchmarks.core.privacy_statement import rounded_up, shown
from benchmarks.flair import paper
from benchmarks.flair.paper import LOCAL, Variant, reasons_against, variant
from benchmarks.reporting.runs import (
    RunRecord,
    by_experiment,
    epsilon_of,
    local_epsilon_of,
    statements_of,
    unprotected,
)
from pfl_ext.models.pretrained import source_of
from pfl_ext.tasks.multi_label_scores import BINNED, COLUMNS

Verdict = Literal["agrees", "above", "below", "not comparable", "not in the paper"]

LEAST_STD = 0.05
"""The paper prints one decimal: a standard deviation of 0.0 there is anything below this."""


@dataclass(frozen=True)
class Cell:
    """One score of one row, percent. ``std`` is the sample's over seeds, None for one seed.

    ``paper_mean`` and ``paper_std`` are the paper's, None where it gives none or the row is not comparable.
    """

    mean: float
    std: float | None
    paper_mean: float | None = None
    paper_std: float | None = None
    unjudged: Verdict = "not in the paper"
    """Why there is no ``paper_mean``."""

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, in points."""
        return None if self.paper_mean is None else self.mean - self.paper_mean

    @property
    def in_std(self) -> float | None:
        """The difference over sqrt(s_paper^2 + s_ours^2), the spread of one run against another.

        The paper's s counts as at least `LEAST_STD`; one seed of ours is taken to spread as the paper's.
        """
        if self.difference is None or self.paper_std is None:
            return None
        theirs = max(self.paper_std, LEAST_STD)
        return self.difference / math.hypot(theirs, theirs if self.std is None else self.std)

    @property
    def tolerance(self) -> float | None:
        """How far from the paper is still agreement, in points."""
        if self.paper_mean is None or self.paper_std is None:
            return None
        return tolerance(self.paper_mean, self.paper_std)

    @property
    def verdict(self) -> Verdict:
        """What the comparison with the paper says."""
        if self.difference is None or self.tolerance is None:
            return self.unjudged
        if abs(self.difference) <= self.tolerance + 1e-9:
            return "agrees"
        return "above" if self.difference > 0 else "below"


def tolerance(mean: float, std: float) -> float:
    """Three of the paper's standard deviations, but a tenth of the mean up to a point, and 0.15, at least."""
    return max(3 * std, min(1.0, 0.1 * mean), 0.15)


@dataclass(frozen=True)
class Row:
    """Runs of one config on one data set, over seeds."""

    variant: Variant
    data: str
    runs: tuple[RunRecord, ...]
    reasons: tuple[str, ...]
    """Why it is not comparable with the paper; empty where it is."""

    @property
    def label(self) -> str:
        """Label of the variant, with the weights it started from where they are not the known ones of its
        network."""
        weights, known = self.runs[0].outcome.get("weights"), source_of(self.runs[0].config.model.arch)
        if not weights or (known is not None and known.is_of(weights["sha256"])):
            return self.variant.label
        return f"{self.variant.label}, weights {weights['sha256'][:8]}"

    @property
    def comparable(self) -> bool:
        """Whether it is the paper's setting, on FLAIR, from the paper's weights."""
        return not self.reasons

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, ascending."""
        return tuple(run.seed for run in self.runs)

    def exact(self, name: str) -> Cell:
        """A score of the best model on test, of which the paper says nothing."""
        values = [float(run.outcome["test"][name]) for run in self.runs]
        return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def cell(self, column: str) -> Cell:
        """A column of the paper's, ours beside it."""
        ours = self.exact(BINNED.get(column, column))
        theirs, spread = (paper.row(self.variant.setting, of_seeds) for of_seeds in ("mean", "std"))
        if theirs is None or spread is None:
            return ours
        if not self.comparable:
            return replace(ours, unjudged="not comparable")
        return replace(ours, paper_mean=theirs[column], paper_std=spread[column])

    @property
    def local(self) -> bool:
        """Whether every update was noised on its device: local differential privacy."""
        return self.runs[0].config.local_privacy is not None

    @property
    def central(self) -> bool:
        """Whether the server's sum was noised: central differential privacy, the paper's PFL rows."""
        return self.runs[0].config.privacy is not None

    @property
    def expects_more(self) -> bool:
        """A private row with the noise that its budget needs: the paper's code adds 3.1 times as much."""
        privacy = self.runs[0].config.privacy
        return privacy is not None and privacy.noise == "calibrated"

    def misses(self) -> list[str]:
        """The columns by which the row misses the paper, each said in a line; none where not comparable."""
        out = []
        for column in COLUMNS:
            cell = self.cell(column)
            if cell.verdict == "below" or (cell.verdict == "above" and not self.expects_more):
                out.append(
                    f"{self.label}: {column} {cell.mean:.1f} for the paper's {cell.paper_mean:.1f}, "
                    f"{cell.difference:+.1f} points where {cell.tolerance:.2f} are allowed"
                )
        return out

    def privacy(self) -> str:
        """Epsilon, delta, and what they are of; empty for runs without privacy."""
        known = statements_of(self.runs)
        if not known:
            return ""
        mark = f"{seeded}; " if (seeded := unprotected(known)) else ""
        if self.local:
            return mark + _local_privacy(known)
        spent = list(map(epsilon_of, known))
        epsilon, delta, simulated, executed = max(spent)
        text = f"{mark}epsilon {shown(epsilon)} at delta {rounded_up(delta)}"
        return text + (f", SIMULATED; as run {shown(executed)}" if simulated else "")


def _local_privacy(statements: Sequence[Tree]) -> str:
    epsilon, delta, rounds, spent = max(map(local_epsilon_of, statements), key=lambda found: found[3])
    return (
        f"LOCAL: epsilon {shown(epsilon)} of one update; who took part most, in {rounds} rounds, "
        f"spent {shown(spent)} at delta {rounded_up(delta)}"
    )


def classes_without_positives(results: Tree) -> str:
    """Which classes have no positive on test, and how much the C columns can be at most; empty if none."""
    absent = [name for name, share in results["prevalence"].items() if not share]
    if not absent:
        return ""
    number = len(results["prevalence"])
    names = ", ".join(absent[:5]) + (", ..." if absent[5:] else "")
    have, count = ("has", "counts") if len(absent) == 1 else ("have", "count")
    return (
        f"{len(absent):,} of {number:,} classes {have} no positive on test ({names}) and {count} 0: "
        f"C-AP, C-P, C-R and C-F1 are at most {100 * (number - len(absent)) / number:.1f}"
    )


def make_rows(records: Sequence[RunRecord]) -> list[Row]:
    """Finished runs as rows, the paper's order first, then by label. A row is the seeds of one experiment.

    Args:
        records: no two of them of one experiment and seed, see `benchmarks.reporting.runs.split_duplicates`.
    """
    rows = []
    for runs in by_experiment(records):
        first = runs[0]
        reasons = tuple(reasons_against(first.config, first.outcome, first.data))
        rows.append(Row(variant(first.config), first.data_key, runs, reasons))
    names = [name for row in paper.settings() for name in (row, row.replace("PFL-", LOCAL))]
    order = {name: place for place, name in enumerate(names)}
    rows.sort(
        key=lambda row: (order.get(row.variant.setting, 99), row.variant.setting, row.variant.differences)
    )
    return rows
