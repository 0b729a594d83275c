"""Writing figures of matplotlib whose texts come from data and from names of files."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, Formatter, FuncFormatter

from dataset.pages import clean

THIN = "\u200a"
"""A space before a label that begins with an underscore: matplotlib would leave that out of a legend."""
BOXES = "letters that matplotlib's font lacks are boxes"
NAMED = (FixedFormatter, FuncFormatter, StrCategoryFormatter)
"""Formatters whose labels may be names."""
KEPT = f"\n{THIN}"
"""Letters that are shown, although Python calls them unprintable."""


def write_figure(figure: Figure, target: Any, name: str, **options: Any) -> None:
    """``figure.savefig``, with every text as it is. A letter that the font lacks is drawn as a box.

    Args:
        figure: one whose texts hold no mathematics.
        target: the path or the buffer to write.
        name: of the figure, for lines about such letters and what else matplotlib warns of; empty for none.
        options: what ``savefig`` takes.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _make_literal(figure)
        figure.savefig(target, **options)
    of_users = [str(each.message) for each in caught if each.category is UserWarning]
    lines = {BOXES if text.startswith("Glyph ") else text: None for text in of_users}
    for line in lines if name else ():
        print(f"WARNING: {name}: {line}", file=sys.stderr)
    for each in caught:
        if each.category is not UserWarning:  # of a developer, as of what is deprecated
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _make_literal(figure: Figure) -> None:
    """Matplotlib reads text between dollars as mathematics, and cannot draw half characters."""
    for part in (figure, *figure.axes):
        for child in part.get_children():
            if isinstance(child, Axis):  # the ticks of a logarithmic one are mathematics
                formatter = child.get_major_formatter()
                done = isinstance(getattr(formatter, "func", None), _Literal)
                if isinstance(formatter, NAMED) and not done:
                    child.set_major_formatter(FuncFormatter(_Literal(formatter)))
            for text in _texts_of(child):
                text.set_text(_shown(text.get_text()))
                text.set_parse_math(False)


def _texts_of(child: Artist) -> list[Text]:
    if isinstance(child, Legend):
        return [child.get_title(), *child.get_texts()]
    if isinstance(child, Axis):
        return [child.label]
    return [child] if isinstance(child, Text) else []


class _Literal:
    """Labels of ticks as they are."""

    def __init__(self, formatter: Formatter) -> None:
        self.formatter = formatter

    def __call__(self, value: float, place: int | None = None) -> str:
        return _shown(self.formatter(value, place)).replace("$", r"\$")


def _shown(text: str) -> str:
    return "".join(letter if letter in KEPT else clean(letter) for letter in text)
