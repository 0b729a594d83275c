"""Writing figures of matplotlib whose texts come from data and from names of files."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, Formatter, FuncFormatter

from dataset.pages import clean

THIN = "\u200a"
"""A space before a label that begins with an underscore: matplotlib would leave that out of a legend."""
KEPT = f"\n{THIN}"
"""Letters that are shown, although Python calls them unprintable."""


def write_figure(figure: Figure, target: Any, name: str, **how: Any) -> None:
    """``figure.savefig``, with every text as it is. A letter that the font lacks is drawn as a box.

    Args:
        figure: one whose texts hold no mathematics.
        target: the path or the buffer to write.
        name: of the figure, for the warning about such letters; empty for none.
        how: what ``savefig`` takes.
    """
    _make_literal(figure)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        figure.savefig(target, **how)
    lacking = [each for each in said if str(each.message).startswith("Glyph ")]
    if lacking and name:
        print(f"WARNING: {name} has boxes for letters that matplotlib's font lacks", file=sys.stderr)
    for each in said:
        if each not in lacking:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _make_literal(figure: Figure) -> None:
    """Matplotlib reads text between dollars as mathematics, and cannot draw half characters."""
    of_axes = set[int]()
    for axis in figure.findobj(Axis):
        formatter = axis.get_major_formatter()
        done = isinstance(getattr(formatter, "func", None), _Literal)
        if isinstance(formatter, (FixedFormatter, FuncFormatter)) and not done:
            axis.set_major_formatter(FuncFormatter(_Literal(formatter)))
        ticks = (*axis.majorTicks, *axis.minorTicks)
        labels = (axis.offsetText, *(label for tick in ticks for label in (tick.label1, tick.label2)))
        of_axes |= {id(label) for label in labels}  # those of a logarithmic axis are mathematics
    for text in figure.findobj(Text):
        if id(text) not in of_axes:
            text.set_text(_shown(text.get_text()))
            text.set_parse_math(False)


class _Literal:
    """Labels of ticks as they are."""

    def __init__(self, formatter: Formatter) -> None:
        self.formatter = formatter

    def __call__(self, value: float, place: int | None = None) -> str:
        return _shown(self.formatter(value, place)).replace("$", r"\$")


def _shown(text: str) -> str:
    return "".join(letter if letter in KEPT else clean(letter) for letter in text)
