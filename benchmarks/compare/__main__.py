"""Any runs of any benchmark side by side, in one page.

    python -m benchmarks.compare RUN_DIR... [--output_dir D] [--target 50] [--at_megabytes 100]
                                 [--columns data.partition [--rows server.momentum ...]] [--names N.yaml]
                                 [--scores macro-F1 AUROC ECE]

Folders are searched for runs. Runs that differ only in the seed are one group. Runs that have not ended are
shown up to their last round, and the page says so. These files are written into D (default: compare):

    compare.html    the page, in one file
    compare.png     its charts; charts/ has each as PNG, SVG and PDF
    compare.csv     each number of each run
    table.tex       a table for a paper
    classes.tex     scores of each class, if there are at most 40 classes
    users.tex       with --scores: their means over users, each by the model that the user uses
    clients.tex     scores of each user, such as a hospital, of runs that scored at most 40
    crossed.tex     with --columns KEY: a column for each value, a row for each method (on the page, too)

Runs are of one method if all their other keys are equal; with --rows, only the keys given there. N.yaml holds
lines "label: name" to rename labels; groups and rows are in its order. LaTeX reads $...$ in a name as
mathematics. With --scores, tables, tests and charts are of these scores, by their names in results.json,
instead of the benchmark's headline.
"""

from __future__ import annotations

import math
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import charts, groups, reaching, tables
from benchmarks.compare.crossed import Crossed, crossed
from benchmarks.compare.crossed import named as crossed_named
from benchmarks.compare.groups import Comparison
from benchmarks.compare.latex import latex, latex_classes, latex_crossed, latex_in_use, latex_users
from benchmarks.compare.reading import compare
from benchmarks.core.commands import command_parser
from benchmarks.core.config.trees import read_yaml
from benchmarks.reporting.single_users import BY_CHANCE
from benchmarks.reporting.tables import plain_names, write_texts
from dataset import pages
from dataset.cli import counted, input_file, output_folder
from dataset.cli import run as run_command
from dataset.files import write_bytes
from dataset.pages import Html, join, section, tag
from pfl_ext.tasks.score_kinds import PERCENT

WRITTEN = ".compare"
"""The file with the names of the files that a comparison wrote; the next one removes what it has not."""
EXPLANATION = (
    "Numbers are means over the finished runs of a group, ± their standard deviation (n − 1) where there are "
    "several. Scores are in percent. Runs of one group differ by their seed alone: config, data and first "
    "weights are the same."
)
UNITS = "Scores that are shown without % are in units of their own."
OTHER_WAY = (
    "Of a score that is the better the lower it is, the best decile ends at the 10th percentile, and the "
    "worst one begins at the 90th."
)
CURVES = (
    "A line is the mean over the finished runs of a group, and its band goes from the least to the greatest "
    "of them. Thin lines are runs that have not finished. The model of round r has had "
    "r updates."
)
EPSILON = (
    "The epsilon of a model is counted as in privacy.json, at the end of each twentieth of the run, so that "
    "it is never too low, and the last model of each twentieth is shown. Of several seeds it is the largest; "
    "with noise on each device it is that of the user who took part most."
)
BYTES = (
    "Bytes are counted, not measured: what the algorithm sends to and from a user in a round, uncompressed, "
    "times the users of the round; a user that drops out counts as if all had been sent. Wall clock is that "
    "of the simulation on the machine named below."
)
FAIRNESS = (
    "Scores of single users, each by itself, in percent; all users weigh the same. The worst decile ends at "
    "the 10th percentile: a tenth of the users have at most this score. The best decile begins at the 90th. "
    "Users seen in training stand apart from new ones; there a decile is the mean over the tenth of users "
    "with the worst or best scores. The std over users divides by their number, that over seeds (±) by "
    f"n − 1. {BY_CHANCE}"
)


def _page(
    comparison: Comparison,
    found: Sequence[charts.Chart],
    target: float | None,
    megabytes: float | None,
    crossing: Crossed | None,
) -> str:
    labels = comparison.labels
    names = [charts.key(place, tables.breakable(label)) for place, label in enumerate(labels)]
    legend = tag("ul", *(tag("li", name) for name in names), class_="legend")
    drawn = tag("div", *(charts.svg(chart, labels) for chart in found), class_="charts")
    users = tables.users(comparison)
    spent = [tag("p", EPSILON, class_="note")] if any("epsilon" in chart.title for chart in found) else []
    fairness = FAIRNESS if comparison.usual else f"{FAIRNESS} {UNITS} {OTHER_WAY}"
    parts: dict[str, Sequence[object]] = {
        "Overview": [
            tables.overview(comparison),
            tag("p", EXPLANATION if comparison.usual else f"{EXPLANATION} {UNITS}", class_="note"),
            tables.unfinished(comparison),
            tables.directories(comparison),
        ],
        "Methods": [] if crossing is None else [tables.by_key(comparison, crossing)],
        "Curves": [legend, drawn, tag("p", CURVES, class_="note"), *spent] if found else [],
        "Scores": [tables.measured(comparison, [*tables.sections(comparison, "test"), "val, best model"])],
        "Config": [tables.configs(comparison)],
        "Time, bytes, cost": [
            tables.measured(comparison, ["time", "bytes", "cost"]),
            tag("p", BYTES),
            reaching.reached(comparison, target),
            reaching.at_megabytes(comparison, megabytes),
        ],
        "Fairness": [tag("p", fairness if users else "No run scored its users one by one."), users],
        "Privacy": [tables.privacy(comparison)],
        "Significance": [tables.significance(comparison)],
        "Machines and data": [tables.facts(comparison)],
        "Left out": [pages.bullets(comparison.left_out)] if comparison.left_out else [],
    }
    shown = {title: part for title, part in parts.items() if any(part)}
    body: list[Html] = [pages.contents(shown), *(section(title, *part) for title, part in shown.items())]
    return pages.page(title_of(comparison), intro(comparison), body)


def title_of(comparison: Comparison) -> str:
    """``Compared: fedavg and dsgd``."""
    labels = comparison.labels
    listed = ", ".join(labels[:-1]) + (" and " if labels[:-1] else "") + labels[-1]
    return f"Compared: {listed}" if len(labels) <= 4 else f"{len(labels)} groups of runs compared"


def intro(comparison: Comparison) -> Html:
    """How many runs there are, and of what."""
    runs = comparison.runs
    under_way = sum(not run.finished for run in runs)
    text = f"{counted(len(runs), 'run', 'runs')} in {counted(len(comparison.groups), 'group', 'groups')}. "
    if under_way:
        text += f"{counted(under_way, 'of them has', 'of them have')} not finished. "
    return join([text, "Made by ", tag("code", "python -m benchmarks.compare"), "."])


def _named(comparison: Comparison, crossing: Crossed | None, path: Path) -> tuple[Comparison, Crossed | None]:
    """Both by the names in a file.

    Raises:
        ValueError: when it cannot be read, or holds a label that there is not.
    """
    names = {str(label): name for label, name in read_yaml(input_file("--names", path)).items()}
    if bad := [label for label, name in names.items() if not (isinstance(name, str) and name.strip())]:
        raise ValueError(f"--names {path}: the name of {bad[0]!r} is not text; put it in quotes")
    labels = comparison.labels
    labels += [] if crossing is None else [*crossing.rows, *crossing.columns]
    if unknown := [label for label in names if label not in labels]:
        known = "; ".join(dict.fromkeys(labels))
        raise ValueError(f"--names {path}: there is no group or run named {unknown[0]!r}; there are {known}")
    if crossing is None:
        return groups.named(comparison, names), None
    return groups.named(comparison, names, crossing.row_of), crossed_named(crossing, names)


def _check_target(comparison: Comparison, target: float | None) -> None:
    """Refuse a target that no score can have."""
    if target is None:
        return
    if not math.isfinite(target):
        raise ValueError(f"--target is {target:g}: give a number")
    percentages = all(comparison.unit(score) == PERCENT for score in comparison.headline)
    if percentages and not 0 <= target <= 100:
        raise ValueError(f"--target is {target:g}: give a percentage from 0 to 100")


def _options(argv: Sequence[str]) -> Namespace:
    """What the command line asks for."""
    parser = command_parser("compare", __doc__)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output_dir", type=Path, default=Path("compare"))
    parser.add_argument(
        "--target", type=float, help="a score, as 50 for 50 percent: show when each group reached it"
    )
    parser.add_argument(
        "--at_megabytes", type=float, metavar="MB", help="show what each group scored after this traffic"
    )
    parser.add_argument(
        "--columns", metavar="KEY", help="a key: also make a table with a column for each value"
    )
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="KEY", help="keys that define the rows of this table"
    )
    parser.add_argument(
        "--names", type=Path, metavar="YAML", help="names to show for labels, and their order"
    )
    parser.add_argument(
        "--scores", nargs="+", default=[], metavar="NAME", help="scores to show instead of the headline"
    )
    options = parser.read(argv)
    output_folder("--output_dir", options.output_dir)
    if options.rows and options.columns is None:
        raise ValueError("--rows can be used only with --columns")
    return options


def main(argv: Sequence[str]) -> None:
    """Read, draw, write."""
    options = _options(argv)
    comparison = compare(options.run_dirs).showing(options.scores)
    _check_target(comparison, options.target)
    if options.at_megabytes is not None and not 0 <= options.at_megabytes < math.inf:
        raise ValueError(f"--at_megabytes is {options.at_megabytes:g}: give a number of MB, at least 0")
    crossing = None if options.columns is None else crossed(comparison, options.columns, options.rows)
    if options.names is not None:
        comparison, crossing = _named(comparison, crossing, options.names)
    written = _write(comparison, crossing, options, shlex.join(["python", "-m", "benchmarks.compare", *argv]))
    for line in comparison.left_out:
        print(f"left out: {pages.clean(line)}")
    if unfinished := comparison.unfinished(groups.MOST_NAMES):
        print(f"WARNING: {unfinished}", file=sys.stderr)
    shown = [path if path.parent == options.output_dir else path.parent for path in written]
    print(f"written: {', '.join(map(str, dict.fromkeys(shown)))}")


def _write(comparison: Comparison, crossing: Crossed | None, options: Namespace, command: str) -> list[Path]:
    """Write page, tables and charts into a folder in place of those of an earlier comparison; their paths."""
    folder, found = options.output_dir, charts.charts(comparison)
    replaced = _of_an_earlier_one(folder)
    page = folder / "compare.html"
    pages.write(page, _page(comparison, found, options.target, options.at_megabytes, crossing))
    texts = {
        "compare.csv": tables.csv(comparison),
        "table.tex": latex(comparison, command),
        "classes.tex": latex_classes(comparison, command),
        "users.tex": latex_in_use(comparison, command),
        "clients.tex": latex_users(comparison, command),
        "crossed.tex": "" if crossing is None else latex_crossed(comparison, crossing, command),
    }
    written = [page, *write_texts(folder, texts)]
    if found:
        labels = comparison.labels
        charts.png(found, labels, folder / "compare.png")
        stems = [folder / "charts" / name for name in plain_names(chart.title for chart in found)]
        single = [path for chart, stem in zip(found, stems) for path in charts.single(chart, labels, stem)]
        written += [folder / "compare.png", *single]
    names = sorted(path.relative_to(folder).as_posix() for path in written)
    for old in replaced - {*names}:
        (folder / old).unlink()
    write_bytes(folder / WRITTEN, "\n".join(names).encode())
    return written


def _of_an_earlier_one(folder: Path) -> set[str]:
    """The files that an earlier comparison wrote into a folder; the user's own files are none of them."""
    try:
        names = (folder / WRITTEN).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return set()
    near = {name for name in names if Path(name).parent in (Path(), Path("charts"))}
    return {name for name in near if (folder / name).is_file()}


if __name__ == "__main__":
    sys.exit(run_command(main))
