"""The charts of a comparison: as SVG of the page, in its colours, all in one PNG, and each by itself."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.compare.groups import Comparison, Group
from benchmarks.compare.measures import Axis, deciles
from benchmarks.compare.series import Line, line_of, lines_of
from benchmarks.reporting.plots import BLACK, COLOURS, GREY, legend_below, save, save_both, style
from benchmarks.reporting.runs import statements_of, unprotected
from dataset.arrays import BoolArray, FloatArray
from dataset.drawing import THIN, write_figure
from dataset.pages import Html, tag
from pfl_ext.tasks.multi_label_scores import shown
from pfl_ext.tasks.score_kinds import labelled

WIDTH, HEIGHT = 4.4, 3.1
"""Size of a chart in inches: on a phone its letters are about as large as the page's."""
WIDE, HIGH = 6.4, 4.2
"""Size of a chart in a file of pictures, in inches."""
INK, LINE = "#010203", "#040506"
SERIES = tuple(f"#0a0b0{place}" for place in range(len(COLOURS)))
"""What stands for the page's colours of letters, of lines and of groups while a chart is drawn."""
SPREAD_OF_BYTES = 20
"""Least ratio between the bytes of two groups at which their axis is logarithmic."""
MARKS = {
    "o": "M14 6a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "s": "M14 2h8v8h-8z",
    "D": "M18 1l5 5l-5 5l-5 -5z",
    "^": "M18 1l5 9h-10z",
    "v": "M18 11l-5 -9h10z",
    "P": "M16.5 2h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5z",
    "X": "M14 4l2 -2l2 2l2 -2l2 2l-2 2l2 2l-2 2l-2 -2l-2 2l-2 -2l2 -2z",
}
DOTS = {"-": "", "--": "6 3", ":": "2 3", "-.": "6 3 2 3"}
"""The markers and lines of `benchmarks.reporting.plots.style` as paths of SVG in a box of 36 x 12."""
EPSILONS: dict[Axis, str] = {
    "epsilon": "of the run as executed",
    "simulated epsilon": "of the simulated system",
}
FEW_STEPS = 15
"""Curves of so few points have a marker at each."""


@dataclass(frozen=True)
class Chart:
    """What is drawn in one pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False

    def alt(self, labels: Sequence[str]) -> str:
        """What the chart says, for who cannot see it: where each curve ends."""
        ends = [f"{labels[line.place]} ends at {line.mean[-1]:.4g}" for line in self.lines if len(line.mean)]
        return f"{self.title}, {self.y_label} over {self.x_label}: {'; '.join(ends)}"


def charts(comparison: Comparison) -> list[Chart]:
    """The charts for which some run has the numbers."""
    found: list[Chart] = []
    for name in comparison.headline:
        for split in ("val", "test"):
            found += _of_score(comparison, split, name)
    for split in ("val", "test"):
        over = units(comparison.groups)
        lines = lines_of(comparison.groups, split, "loss", "steps")
        found += [Chart(f"Loss on {split}", over, "loss", lines)] if lines else []
    numbered = enumerate(comparison.groups)
    training = [line_of(place, group, ("train_loss",), "steps") for place, group in numbered]
    known = [line for line in training if line is not None]
    found += [Chart("Loss in training", units(comparison.groups), "loss", known)] if known else []
    for name in comparison.headline:
        found += _of_users(comparison, name)
    return found


def _of_score(comparison: Comparison, split: str, name: str) -> list[Chart]:
    """A score over steps, over time, over the devices' virtual time, over bytes and over epsilon."""
    groups, label = comparison.groups, labelled(shown(name), comparison.unit(name))
    title = f"{shown(name)} on {split}"
    if not (over_steps := lines_of(groups, split, name, "steps")):
        return []
    made = [Chart(title, units(groups), label, over_steps)]
    if over_time := lines_of(groups, split, name, "minutes"):
        made.append(Chart(f"{title} over time", "minutes of training", label, over_time))
    if over_virtual := lines_of(groups, split, name, "virtual minutes"):
        made.append(Chart(f"{title} over virtual time", "minutes of devices", label, over_virtual))
    over_sent = lines_of(groups, split, name, "MB from users")
    if over_bytes := lines_of(groups, split, name, "MB"):
        spread = _spread(over_bytes)
        made.append(Chart(f"{title} over bytes", "MB between server and users", label, over_bytes, spread))
    if any(not np.allclose(sent.x, both.x / 2) for sent, both in zip(over_sent, over_bytes)):
        spread = _spread(over_sent)
        made.append(Chart(f"{title} over bytes sent", "MB from users", label, over_sent, spread))
    for axis, of in EPSILONS.items():
        if over_epsilon := lines_of(groups, split, name, axis):
            drawn = list(map(_last_of_each, over_epsilon))
            runs = [run for line in drawn for run in groups[line.place].runs]
            seeded = unprotected(statements_of(runs))
            along = f"epsilon {of}; {seeded}" if seeded else f"epsilon {of}"
            made.append(Chart(f"{title} over {axis}", along, label, drawn))
    return made


def _spread(lines: Sequence[Line]) -> bool:
    """Whether the axis of the bytes is logarithmic."""
    ends = [line.x[-1] for line in lines]
    return bool(max(ends) >= SPREAD_OF_BYTES * min(ends) > 0)


def _of_users(comparison: Comparison, name: str) -> list[Chart]:
    """The score of single users: how many of them are at or below it."""
    lines = []
    for place, group in enumerate(comparison.groups):
        found = [shares for run in group.finished if (shares := deciles(run, name)) is not None]
        places = {tuple(shares[0]) for shares in found}
        if len(places) == 1:
            values = np.array([shares[1] for shares in found])
            x = np.array(places.pop(), np.float64)
            lines.append(Line(place, x, values.mean(0), values.min(0), values.max(0), len(values)))
    if not lines:
        return []
    along = f"% of users, the {'best' if comparison.is_lower_better(name) else 'worst'} first"
    label = labelled(shown(name), comparison.unit(name))
    return [Chart(f"{shown(name)} of single users", along, label, lines)]


def units(groups: Sequence[Group]) -> str:
    """What the steps of these groups are: ``rounds``, ``epochs``, or both."""
    return " or ".join(dict.fromkeys(f"{group.runs[0].config.unit}s" for group in groups))


def draw(axes: Axes, chart: Chart, labels: Sequence[str] | None, colours: Sequence[str]) -> None:
    """One chart.

    Args:
        axes: to draw it in.
        chart: what is drawn.
        labels: of the groups, for a legend; None: without.
        colours: of the letters, of axes and grid, and of the groups in turn.
    """
    ink, line_colour, *series = colours
    for line in map(_positive, chart.lines) if chart.log_x else chart.lines:
        looks = {**style(line.place), "color": series[line.place % len(series)]}
        looks |= {"markersize": 4.5, "markevery": -(-len(line.x) // FEW_STEPS) or 1, "linewidth": 1.6}
        if line.n > 1:
            axes.fill_between(line.x, line.low, line.high, color=looks["color"], alpha=0.18, linewidth=0)
        label = None if labels is None else _plain(labels[line.place])
        axes.plot(line.x, line.mean, **looks, label=label)
        for x, values in line.singles:
            axes.plot(x, values, color=looks["color"], linestyle=looks["linestyle"], linewidth=0.8, alpha=0.8)
    axes.set_xlabel(chart.x_label, color=ink)
    axes.set_ylabel(chart.y_label, color=ink)
    if chart.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
    else:
        whole = set(chart.x_label.split(" or ")) <= {"rounds", "epochs"}  # there is no half of one
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole))
        if axes.get_xlim()[1] >= 1000:
            axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(color=line_colour, linewidth=0.6, alpha=0.45)
    axes.tick_params(colors=ink, which="both", labelsize=9)
    for side, edge in axes.spines.items():
        edge.set_color(line_colour)
        edge.set_visible(side in ("left", "bottom"))


def _positive(line: Line) -> Line:
    """What a logarithmic axis can show of a line."""
    return _part(line, lambda x: x > 0)


def _last_of_each(line: Line) -> Line:
    """A line with one model for each x, the last: epsilon is counted at a few rounds of a run."""
    return _part(line, lambda x: np.append(x[1:] > x[:-1], [True] * (len(x) > 0)))


def _part(line: Line, kept: Callable[[FloatArray], BoolArray]) -> Line:
    """The points of a line where ``kept`` of its x ``[n]`` holds."""
    places, singles = kept(line.x), [(x[kept(x)], values[kept(x)]) for x, values in line.singles]
    parts = {name: getattr(line, name)[places] for name in ("x", "mean", "low", "high")}
    return replace(line, **parts, singles=singles)


def _plain(label: str) -> str:
    """A label for matplotlib, which would hide a name that begins with an underscore."""
    return f"{THIN}{label}" if label.startswith("_") else label


def svg(chart: Chart, labels: Sequence[str]) -> Html:
    """A chart as an element of the page, with the page's letters and colours."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    draw(axes, chart, None, (INK, LINE, *SERIES))
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        write_figure(figure, buffer, "", format="svg", metadata=nothing)
    caption = tag("figcaption", chart.title)
    return tag("figure", caption, Html(_inline(buffer.getvalue(), chart.alt(labels))))


def _inline(drawn: str, alt: str) -> str:
    """A file of matplotlib as an element of a page: without what a file needs, with the page's colours."""
    body = drawn[drawn.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[A-Za-z0-9.]+_\d+">', "<g>", body)
    head = re.search(r'viewBox="[^"]*"', body)
    assert head is not None
    start = tag("svg", role="img", aria_label=alt).removesuffix("></svg>")
    body = f"{start} {head[0]}>{tag('title', alt)}{body[body.index('>') + 1 :]}"
    body = re.sub(r"font: [^;\"]*?(\d+)px [^;\"]*", r"font-size: \1px", body)
    colours = {INK: "var(--ink)", LINE: "var(--muted)"}
    colours |= {colour: f"var(--s{place})" for place, colour in enumerate(SERIES)}
    for colour, variable in colours.items():
        body = body.replace(colour, variable)
    return re.sub(r"\n\s*", "\n", body)


def key(place: int, label: Html) -> Html:
    """The line and the marker of a group beside its name."""
    looks, colour = style(place), f"var(--s{place % len(SERIES)})"
    dash = (
        DOTS[looks["linestyle"]] if looks["linestyle"] in DOTS else " ".join(map(str, looks["linestyle"][1]))
    )
    line = tag("path", d="M0 6H36", stroke=colour, stroke_width=2, stroke_dasharray=dash or None)
    mark = tag("path", d=MARKS[looks["marker"]], fill=colour)
    drawn = tag("svg", line, mark, aria_hidden="true", viewBox="0 0 36 12")
    return tag("span", drawn, tag("span", label), class_="key")


def png(found: Sequence[Chart], labels: Sequence[str], path: Path) -> None:
    """Draw all charts in one picture, with the groups below them."""
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(WIDE * columns, HIGH * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, chart in zip(panels, found):
        _titled(axes, chart, labels)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    legend_below(figure, columns)
    save(figure, path)


def single(chart: Chart, labels: Sequence[str], stem: Path) -> list[Path]:
    """Draw a chart by itself, as PNG and SVG, and without its title as PDF for a paper; their paths.

    Args:
        chart: what is drawn.
        labels: of the groups.
        stem: the files' path without their suffix.
    """
    figure = Figure(figsize=(WIDE, HIGH + 0.4), layout="constrained")
    axes = figure.subplots()
    _titled(axes, chart, labels)
    legend_below(figure, 1)
    paths = [*save_both(figure, stem), stem.with_name(f"{stem.name}.pdf")]
    axes.set_title("", loc="left")
    save(figure, paths[-1])
    return paths


def _titled(axes: Axes, chart: Chart, labels: Sequence[str]) -> None:
    draw(axes, chart, labels, (BLACK, GREY, *COLOURS))
    axes.set_title(chart.title, fontsize=11, loc="left")
