"""Figures show names of classes and of files as they are."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.reporting import plots
from dataset.drawing import THIN, write_figure

NAMES = ("$_$", r"a$\q{$", r"\$5 and $6", "half \udce9")
"""Mathematics for matplotlib, of which only the third can be read; the last is half a character."""


def figure_of(names: tuple[str, ...] = NAMES) -> Figure:
    """All kinds of texts, beside a logarithmic axis, whose ticks are mathematics indeed."""
    figure = Figure(layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    middle.barh(names, range(len(names)))
    for place, name in enumerate(names):
        left.bar(place, 1, label=name)
    left.set_xticks(range(len(names)), names)
    left.set(title="\n".join(names), xlabel=names[0], ylabel=names[1])
    right.plot([1, 1000], [1, 1000])
    right.set(xscale="log", yscale="log")
    figure.legend()
    figure.suptitle(names[0])
    return figure


def svg(figure: Figure) -> str:
    """The figure with its texts as texts."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        write_figure(figure, buffer, "figure", format="svg")
    return buffer.getvalue()


def test_names_are_drawn_as_they_are_each_time() -> None:
    figure = figure_of()
    for _ in range(2):
        shown = re.findall(r"<text[^>]*>([^<]*)</text>", svg(figure))
        for name in (*NAMES[:3], "half \ufffd"):
            assert shown.count(name) >= 4, f"{name}: as ticks, in the legend, and in the title"
        assert not {r"\$_\$", NAMES[3]} & set(shown)


def test_a_picture_is_written_whatever_the_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = plots.save_both(figure_of((*NAMES, "价格", "a")), tmp_path / "picture")
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert all(path.stat().st_size for path in paths)
    assert capsys.readouterr().err == (
        "WARNING: picture.png: letters that matplotlib's font lacks are boxes\n"
    )


def test_other_warnings_of_matplotlib_are_lines_and_those_for_developers_are_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figure = Figure()
    figure.subplots().plot([0, 1])
    figure.draw = lambda *_: warnings.warn("strange data", stacklevel=1)  # type: ignore[method-assign]
    write_figure(figure, io.BytesIO(), "a.png", format="png")
    assert capsys.readouterr().err == "WARNING: a.png: strange data\n"
    figure.draw = lambda *_: warnings.warn("old", DeprecationWarning, 1)  # type: ignore[method-assign]
    with pytest.warns(DeprecationWarning, match="old"):
        write_figure(figure, io.BytesIO(), "a.png", format="png")


def test_a_label_with_a_thin_space_keeps_it() -> None:
    figure = Figure()
    figure.subplots().plot([0, 1], label=f"{THIN}_run")
    figure.legend()
    assert f"{THIN}_run" in svg(figure)
