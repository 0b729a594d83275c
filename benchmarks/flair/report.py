"""Finished runs as the paper's Table 1, mean and standard deviation over seeds, beside the paper's numbers.

    python -m benchmarks.flair.report RUN_DIR... [--output_dir D] [--format markdown|csv|latex] [--verify]

A RUN_DIR is a run or a directory of runs. Half-finished, broken and duplicate runs are named and the rest is
reported. ``--output_dir`` gets table1.md, table1.csv (a line for each row and column) and table1.tex.
``--verify`` exits with 1 where a finished row at full scale misses the paper by more than its tolerance.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.core.code_version import short_commit
from benchmarks.core.commands import command_parser
from benchmarks.flair import paper
from benchmarks.flair.config import FLAIR
from benchmarks.flair.paper import SCORES, variant
from benchmarks.flair.table import Cell, Row, classes_without_positives, make_rows
from benchmarks.reporting import single_users
from benchmarks.reporting.booktabs import escaped
from benchmarks.reporting.folders import find_runs
from benchmarks.reporting.runs import RunRecord, read_run, split_duplicates
from benchmarks.reporting.tables import csv_table, markdown_table, section, write_texts
from dataset.cli import run as run_command
from pfl_ext.tasks.multi_label_scores import BINNED, COLUMNS, EXACT

CSV_FIELDS = (
    "data", "scale", "row", "comparable", "seeds", "column", "scored_as", "mean", "std",
    "paper_mean", "paper_std", "difference", "difference_in_std", "tolerance", "verdict", "privacy",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What was found: rows of finished runs, and the runs that are in none."""

    rows: list[Row]
    unfinished: list[RunRecord]
    broken: list[RunRecord]
    duplicates: list[tuple[RunRecord, RunRecord]]

    def misses(self) -> list[str]:
        """Every column by which a comparable row misses the paper."""
        return [line for row in self.rows if row.comparable for line in row.misses()]


def collect(paths: Iterable[Path]) -> Report:
    """Read all runs at or below these paths.

    Raises:
        ValueError: for a path without runs.
    """
    records = [read_run(directory, FLAIR, SCORES) for directory in find_runs(paths)]
    kept, duplicates = split_duplicates(run for run in records if run.finished)
    return Report(
        make_rows(kept),
        [r for r in records if r.fault is None and r.results is None],
        [r for r in records if r.fault is not None],
        duplicates,
    )


def _cell(cell: Cell) -> str:
    return f"{cell.mean:.1f}" + ("" if cell.std is None else f" ± {cell.std:.1f}")


def _paper(cell: Cell) -> str:
    return "" if cell.paper_mean is None else f"{cell.paper_mean:.1f} ± {cell.paper_std:.1f}"


def _verdict(cell: Cell) -> str:
    return "" if cell.in_std is None else f"{cell.difference:+.1f} ({cell.in_std:+.1f} s) {cell.verdict}"


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [row.cell(column) for column in COLUMNS]
        exact = [_cell(row.exact(name)) for name in EXACT]
        seeds = ", ".join(map(str, row.seeds))
        lines.append([f"**{row.label}**", seeds, *map(_cell, cells), *exact, row.privacy()])
        if cells[0].paper_mean is not None:
            lines.append(["paper (FLAIR)", "5 seeds", *map(_paper, cells), "", "", ""])
            lines.append(["difference", "", *map(_verdict, cells), "", "", ""])
    return markdown_table(("percent, test", "seeds", *COLUMNS, *EXACT.values(), "privacy"), lines)


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str | None], list[Row]]:
    """Rows by data set and scale; those that are comparable with the paper first."""
    out: dict[tuple[str, str | None], list[Row]] = {}
    for row in sorted(rows, key=lambda row: not row.comparable):
        out.setdefault((row.data, row.variant.scale), []).append(row)
    return out


def _dataset_name(row: Row) -> str:
    data = row.runs[0].data
    counts = f", {sum(data['users'].values()):,} users" if data else ""
    drawn = ", the mini data set" if data.get("source") == "mini" else ""
    return f"{Path(row.runs[0].outcome['dataset']).name}{counts}{drawn}"


def _test_set(row: Row) -> str:
    """The data of a row, and the number of users of its test set."""
    data = row.runs[0].data
    users = f", {data['users']['test']:,} users" if "test" in data.get("users", {}) else ""
    return f"{Path(row.runs[0].outcome['dataset']).name}{users}"


def _further_reasons(rows: Sequence[Row], common: Sequence[str]) -> list[str]:
    """Reasons against rows beyond the common ones and what the labels say, a line for rows with the same."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        reasons = [reason for reason in row.reasons if reason not in (*common, row.variant.reason)]
        if reasons:
            labels.setdefault("; ".join(reasons), []).append(row.label)
    return [f"* {' | '.join(names)}: {reasons}" for reasons, names in labels.items()]


def _not_comparable(rows: Sequence[Row]) -> list[str]:
    """Which of these rows are not comparable with the paper, and why."""
    against = [row for row in rows if not row.comparable]
    if not against:
        return []
    shared = set(against[0].reasons).intersection(*(row.reasons for row in against))
    common = [reason for reason in against[0].reasons if reason in shared]
    which = "These runs are" if len(against) == len(rows) else "Some of these runs are"
    further = _further_reasons(against, common)
    return [
        f"**{which} NOT comparable with the paper**: {'; '.join(common) or 'see below'}.",
        "",
        *([*further, ""] if further else []),
    ]


def markdown(report: Report) -> str:
    """The whole report."""
    lines = ["# Table 1", ""]
    for (_, scale), rows in _groups(report.rows).items():
        lines += [f"## On {_dataset_name(rows[0])}" + (f", scale {scale}" if scale else ""), ""]
        lines += [*_not_comparable(rows), _table(rows), ""]
        of_users = [line for row in rows for line in single_users.rows(row.label, row.runs, "O-AP")]
        lines += single_users.section(of_users)
        absent = dict.fromkeys(classes_without_positives(run.outcome) for row in rows for run in row.runs)
        lines += [line for text in absent if text for line in (f"{text}.", "")]
        present = {row.variant.setting for row in rows if not row.variant.essential}
        missing = [name for name in paper.settings() if name not in present]
        if missing and any(paper.is_flair(row.runs[0].data) for row in rows):
            lines += [f"Missing, without a finished run as shipped: {', '.join(missing)}.", ""]
    lines += _explanation(report) if report.rows else ["No finished run.", ""]
    lines += _privacy_paragraphs(report.rows)
    lines += _left_out(report)
    return "\n".join(lines).rstrip() + "\n"


def _explanation(report: Report) -> list[str]:
    lines = [
        "Mean ± standard deviation over seeds (n - 1). C-AP and O-AP are those of 200 thresholds, as the "
        "paper's; the exact ones stand in their own columns."
    ]
    if any(row.comparable for row in report.rows):
        lines.append(
            "Difference: ours less the paper's, in points and in s = sqrt(paper's std² + ours²), the paper's "
            "at least 0.05; *agrees*: within max(3 of the paper's std, a tenth of the mean but at most 1 "
            "point, 0.15)."
        )
    if any(row.comparable and row.expects_more for row in report.rows):
        lines.append(
            "Private rows may come out above the paper's, whose code adds 3.1 times our noise for its budget."
        )
    origins = [_origin(row.label, run) for row in report.rows for run in row.runs]
    table = markdown_table(list(origins[0]), [list(origin.values()) for origin in origins])
    return [*lines, "", "## What the runs started from", "", table, "", *_notes(report.rows)]


def _origin(label: str, run: RunRecord) -> dict[str, str]:
    """What one run started from, and what it became."""
    results, unknown = run.outcome, "not recorded"
    weights = results.get("weights")
    start = unknown if "weights" not in results else "none (scratch)"
    if weights:
        description = f": {weights['description']}" if weights.get("description") else ""
        start = f"{weights['file']} {weights['sha256'][:8]}{description}"
    return {
        "run": str(run.directory),
        "row": label,
        "seed": str(run.seed),
        "weights": start,
        "parameters": f"{results['parameters']:,}" if "parameters" in results else unknown,
        "norm": str(results.get("norm", unknown)),
        "start probe": str(results.get("start_probe", unknown))[:12],
        "model": str(results.get("model_sha256"))[:8],
        "commit": short_commit(results.get("commit")),
        "seconds": f"{results['wall_clock_s']:.0f}" if "wall_clock_s" in results else "not released",
    }


def _privacy_paragraphs(rows: Sequence[Row]) -> list[str]:
    """The guarantee of each private row in sentences for a paper; runs of older versions have none."""
    lines = []
    for row in rows:
        seeds: dict[str, list[int]] = {}
        for run in row.runs:
            if run.privacy and "paragraph" in run.privacy:
                seeds.setdefault(str(run.privacy["paragraph"]), []).append(run.seed)
        for paragraph, found in seeds.items():
            of = "" if len(found) == len(row.runs) else f" of {', '.join(map(str, found))}"
            lines.append(f"**{row.label}**, each seed{of} by itself: {paragraph}")
    return section("## What the private rows guarantee", lines)


def _notes(rows: Sequence[Row]) -> list[str]:
    """A line for each fact in which the seeds of a row differ, though they should have started alike."""
    lines = []
    for row in rows:
        results = [run.outcome for run in row.runs]
        facts = {
            "weights": [(result.get("weights") or {}).get("sha256") for result in results],
            "number of parameters": [result.get("parameters") for result in results],
            "commit": [result.get("commit") for result in results],
            "hardware": [result.get("hardware") for result in results],
        }
        for name, values in facts.items():
            counts = Counter(map(str, values)).most_common()
            if len(counts) > 1:
                found = ", ".join(f"{value[:12]} ({n})" for value, n in counts)
                lines.append(f"* {row.label}: the seeds differ in {name}: {found}")
    return [*lines, ""] if lines else []


def _left_out(report: Report) -> list[str]:
    half = [f"{run.directory}: {variant(run.config).label}, {run.progress}" for run in report.unfinished]
    return [
        *section("## Half finished, not in the tables", half),
        *section("## Broken, not in the tables", [f"{run.directory}: {run.fault}" for run in report.broken]),
        *section("## Duplicates, not in the tables", [_duplicate(*pair) for pair in report.duplicates]),
    ]


def _duplicate(run: RunRecord, kept: RunRecord) -> str:
    """A run with the config, seed and data of one that is counted, in a line."""
    same = f"{run.directory} repeats {kept.directory}: the same config, seed and data"
    if run.outcome["model_sha256"] == kept.outcome["model_sha256"]:
        return f"{same}, the same model"
    theirs, ours = (r["test"]["C-AP-binned200"] for r in (run.outcome, kept.outcome))
    return f"**{same}, but ANOTHER model** (C-AP {theirs:.2f}; {ours:.2f} is counted)"


def table_csv(report: Report) -> str:
    """A line for each row and column, numbers unrounded; empty where there is none."""
    return csv_table(CSV_FIELDS, [line for row in report.rows for line in _csv_lines(row)])


def _csv_lines(row: Row) -> Iterator[tuple[object, ...]]:
    cells = [(column, BINNED.get(column, column), row.cell(column)) for column in COLUMNS]
    cells += [(name, key, row.exact(key)) for key, name in EXACT.items()]
    scale, seeds = row.variant.scale or "full", " ".join(map(str, row.seeds))
    of_row = (_dataset_name(row), scale, row.label, str(row.comparable).lower(), seeds)
    for column, scored_as, cell in cells:
        compared = (cell.difference, cell.in_std, cell.tolerance)
        numbers = (cell.mean, cell.std, cell.paper_mean, cell.paper_std, *compared)
        yield (*of_row, column, scored_as, *numbers, cell.verdict, row.privacy())


def latex(report: Report) -> str:
    """A ``table*`` (booktabs) for each data set and scale."""
    heads = [*COLUMNS, *EXACT.values()]
    out = ["% made by python -m benchmarks.flair.report; needs \\usepackage{booktabs}"]
    for (_, scale), rows in _groups(report.rows).items():
        where = escaped(_test_set(rows[0])) + (f", scale {escaped(scale)}" if scale else "")
        warning = "" if all(row.comparable for row in rows) else " Not comparable with the paper's rows."
        out += [
            "\\begin{table*}",
            f"\\caption{{Test set of {where}, percent, mean $\\pm$ standard deviation over seeds. C-AP and "
            "O-AP are those of 200 thresholds, as in the FLAIR paper; the exact ones stand last."
            f"{warning}}}",
            f"\\begin{{tabular}}{{p{{5cm}}l{'r' * len(heads)}}}",
            "\\toprule",
            " & ".join(["Setting", "$n$", *heads]) + r" \\",
            "\\midrule",
        ]
        for row in rows:
            cells = [*map(row.cell, COLUMNS), *map(row.exact, EXACT)]
            of_row = [
                f"\\raggedright {escaped(row.label)}",
                str(len(row.runs)),
                *map(escaped, map(_cell, cells)),
            ]
            out.append(" & ".join(of_row) + r" \\")
            if cells[0].paper_mean is not None:
                out.append(" & ".join(["\\quad paper", "5", *map(escaped, map(_paper, cells))]) + r" \\")
        out += ["\\bottomrule", "\\end{tabular}"]
        out += [f"% {escaped(row.label)}: {row.privacy()}" for row in rows if row.privacy()]
        out += ["\\end{table*}"]
    return "\n".join(out) + "\n"


WRITERS = {"markdown": (markdown, "md"), "csv": (table_csv, "csv"), "latex": (latex, "tex")}


def main(argv: Sequence[str]) -> None:
    """Report finished runs as the paper's Table 1; see the module's text."""
    parser = command_parser("flair.report", __doc__)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output_dir", type=Path, help="where table1.md, .csv and .tex go")
    parser.add_argument(
        "--format", choices=sorted(WRITERS), default="markdown", help="format of what is printed"
    )
    parser.add_argument(
        "--verify", action="store_true", help="exit with 1 if a comparable row misses the paper"
    )
    options = parser.parse_args(argv)
    report = write(options.run_dirs, options.output_dir, options.format)
    if not report.rows:
        unfinished, broken = len(report.unfinished), len(report.broken)
        raise ValueError(
            f"no finished run in {', '.join(map(str, options.run_dirs))} ({unfinished} half finished, "
            f"{broken} broken): the report says which; finish them, or give other directories"
        )
    if options.verify:
        verify(report)


def write(run_dirs: Sequence[Path], output_dir: Path | None, kind: str = "markdown") -> Report:
    """Print the report of these runs in one format; into a directory, if one is named, write all."""
    report = collect(run_dirs)
    print(WRITERS[kind][0](report), end="")
    if output_dir is not None:
        write_texts(output_dir, {f"table1.{suffix}": writer(report) for writer, suffix in WRITERS.values()})
    return report


def verify(report: Report) -> None:
    """Say on standard error how the comparable rows stand; exit with 1 if one misses the paper."""
    misses, checked = report.misses(), [row.label for row in report.rows if row.comparable]
    if not checked:
        print("verify: no finished row at full scale on FLAIR, so nothing was compared", file=sys.stderr)
    for line in misses:
        print(f"verify: {line}", file=sys.stderr)
    if misses:
        sys.exit(1)
    if checked:
        print(f"verify: {', '.join(checked)}: within tolerance", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_command(main))
