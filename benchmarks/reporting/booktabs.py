"""Text and tables in LaTeX with booktabs."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from dataset.pages import clean

PLAIN = {
    **{letter: f"\\{letter}" for letter in "{}$%&#_"},
    **{letter: f"{{{letter}}}" for letter in "[]*"},  # after a row's end, LaTeX would read an option
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\char34{}",  # babel gives it a meaning in some languages
    "±": r"$\pm$",
    "×": r"$\times$",
    "→": r"$\to$",
    "–": "--",
    "−": "$-$",
    "…": r"\ldots{}",
}
"""What LaTeX reads for a character, where that is not the character itself."""
ACCENTS = dict(zip("\u0300\u0301\u0302\u0303\u0304\u0307\u0308\u030a\u030b\u030c\u0327", "`'^~=.\"rHvc"))
"""LaTeX's commands for Unicode's combining accents."""
MATHS = re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$(?!\d)")
"""What stands between two dollars, but for amounts of money, as in ``from $5 to $10``."""


class Column(NamedTuple):
    """A column: its head, and each row's cell, escaped."""

    head: str
    cells: Sequence[str]


def escaped(text: str) -> str:
    """Text as LaTeX prints it, with any engine; a letter that not all have becomes its number, ``U+4E2D``."""
    return "".join(map(_letter, unicodedata.normalize("NFC", clean(text))))


def with_maths(name: str) -> str:
    """`escaped`, but for parts between two dollars that LaTeX can read as mathematics: these stay."""
    parts, end = list[str](), 0
    for found in MATHS.finditer(name):
        if _is_maths(found[1]):
            parts += [escaped(name[end : found.start()]), found[0]]
            end = found.end()
    return "".join([*parts, escaped(name[end:])])


def _is_maths(text: str) -> bool:
    """Whether text is ASCII with pairs of braces, and nothing in it ends a cell, a row or the line."""
    plain = re.sub(r"\\[^\\]", "", text)
    depths = list(itertools.accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in plain))
    is_paired = not depths or (min(depths) >= 0 and depths[-1] == 0)
    return text.isascii() and text.isprintable() and is_paired and not re.search(r"[&%#\\]", plain)


def _letter(letter: str) -> str:
    if letter in PLAIN or letter.isascii():
        return PLAIN.get(letter, letter)
    decomposed = unicodedata.normalize("NFD", letter)
    base, marks = decomposed[0], decomposed[1:]
    if base.isascii() and base.isalpha() and marks in ACCENTS:
        return f"\\{ACCENTS[marks]}{{{base}}}"
    return f"U+{ord(letter):04X}"


def booktabs(columns: Sequence[Column], said: Sequence[str], label: str) -> str:
    """A ``table`` environment.

    Args:
        columns: the first is aligned to the left.
        said: the sentences of its caption, escaped.
        label: what ``\\ref`` calls it after ``tab:``.
    """
    rows = zip(*(column.cells for column in columns), strict=True)
    lines = [
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{' '.join(said)}}}",
        f"\\label{{tab:{label}}}",
        f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        "\\toprule",
        " & ".join(column.head for column in columns) + r" \\",
        "\\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"
