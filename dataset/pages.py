"""One HTML file that people look at: its frame, its style, and the parts that pages are put together from.

A page needs no network and has no script. A content security policy in it forbids both, so that even a name
that was not escaped could do no harm. It follows the reader's light or dark theme and fits a phone.

Functions that return ``Html`` have escaped their arguments. Only `Html` is put into a page without escaping.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dataset.files import write_bytes

SERIES_LIGHT = ("#0063a3", "#b06f00", "#007d5a", "#c24e00", "#a8487e", "#1d86c4", "#2b2b2b")
SERIES_DARK = ("#5aa9ff", "#f0b63a", "#2bc99a", "#ff8a5c", "#e79ac8", "#93dcff", "#e8e8e8")
"""Okabe and Ito's colours, darker for white paper and lighter for black, so that thin lines can be seen."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Html(str):
    """Markup that is safe to put into a page without escaping."""

    __slots__ = ()


def clean(value: object) -> str:
    """A value as text that can be shown and written: what cannot be printed (control characters, marks that
    turn the direction of writing, half characters) becomes the replacement character."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in str(value))


def text(value: object) -> Html:
    """A value as escaped text of a page; `Html` is not changed."""
    return value if isinstance(value, Html) else Html(html.escape(clean(value)))


def join(parts: Iterable[object], between: str = "") -> Html:
    """Texts and markup, one after another."""
    return Html(html.escape(between).join(text(part) for part in parts))


def tag(name: str, *parts: object, **attributes: object) -> Html:
    """An element. An attribute that is None is left out; ``_`` in its name stands for ``-``, and at its end
    for nothing (``class_``)."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(clean(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(parts)}</{name}>")


def section(title: str, *parts: object) -> Html:
    """A part of a page with its heading, to which the list of contents can point."""
    return tag("section", tag("h2", title), *parts, id=anchor(title))


def anchor(title: str) -> str:
    """The id of the section with this title."""
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def contents(titles: Iterable[str]) -> Html:
    """The list of contents."""
    links = [tag("li", tag("a", title, href=f"#{anchor(title)}")) for title in titles]
    return tag("nav", tag("ul", *links), aria_label="Contents")


def table(
    caption: str, heads: Sequence[object], rows: Iterable[Sequence[object]], words: bool = False
) -> Html:
    """A table that scrolls by itself where the page is narrow. The first cell of a row is its heading.

    Args:
        caption: what the table shows.
        heads: the heads of all columns.
        rows: the cells, row by row.
        words: whether the cells are words instead of numbers.
    """
    top = tag("tr", *(tag("th", head, scope="col") for head in heads))
    lines = [
        tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in cells))
        for first, *cells in rows
    ]
    kind, body = "words" if words else None, [tag("thead", top), tag("tbody", *lines)]
    whole = tag("table", *body, class_=kind, aria_label=caption)
    scroll = tag("div", whole, class_="scroll", role="region", aria_label=caption, tabindex="0")
    return join([tag("h3", caption), scroll])


def bullets(lines: Iterable[object]) -> Html:
    """A list."""
    return tag("ul", *(tag("li", line) for line in lines))


def picture(content: bytes, kind: str, alt: str, width: int, height: int) -> Html:
    """An image inside the page.

    Args:
        content: the content of an image file.
        kind: ``png`` or ``jpeg``.
        alt: what the image shows.
        width: width in pixels.
        height: height in pixels.
    """
    data = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    written = {"src": data, "alt": alt, "width": width, "height": height}
    return Html("<img" + "".join(f' {key}="{text(clean(value))}"' for key, value in written.items()) + ">")


def bars(title: str, counts: Mapping[str, int], colour: int = 0) -> Html:
    """Horizontal bars with their names and numbers, which are text: an HTML list, no picture.

    Args:
        title: the chart's title.
        counts: the number of each bar, by its name.
        colour: the number of the bars' colour.
    """
    most = max([*counts.values(), 1])
    rows = [
        tag(
            "li",
            tag("span", name, class_="name"),
            tag("span", tag("i", style=f"width:{100 * count / most:.4g}%"), class_="bar"),
            tag("span", f"{count:,}", class_="count"),
        )
        for name, count in counts.items()
    ]
    caption = tag("figcaption", title)
    listed = tag("ul", *rows, class_="bars", style=f"--bar:var(--s{colour})")
    return tag("figure", caption, listed)


def bytes_in_words(number: float) -> str:
    """``1.25 MB``, by powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 999.5:  # which rounds to 1000
            return f"{number:.0f} B" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB" if abs(number) < 999.5 else f"{number:,.0f} TB"


def page(title: str, intro: object, body: Iterable[Html], style: str = "") -> str:
    """A whole page.

    Args:
        title: the page's title.
        intro: one or more sentences below the title.
        body: the sections.
        style: additional CSS.
    """
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{_STYLE}{style}</style>"
    )
    main = tag("main", tag("header", tag("h1", title), tag("p", intro)), *body)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{main}</body></html>\n'


def write(path: Path, content: str) -> None:
    """Write a page."""
    write_bytes(path, content.encode())


def _variables(series: Sequence[str]) -> str:
    return "".join(f"--s{place}:{colour};" for place, colour in enumerate(series))


_STYLE = (
    ":root{color-scheme:light dark;--paper:#fff;--raised:#f6f7f9;--ink:#1b1f24;--muted:#57606a;"
    f"--line:#d5d9df;--link:#0a58a8;{_variables(SERIES_LIGHT)}}}"
    "@media(prefers-color-scheme:dark){:root{--paper:#14171b;--raised:#1c2026;--ink:#e6e8eb;--muted:#a0a8b2;"
    f"--line:#363c45;--link:#7db8ff;{_variables(SERIES_DARK)}}}}}"
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
  font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:78rem;margin:0 auto;padding:clamp(1rem,4vw,2.5rem)}
h1{font-size:clamp(1.5rem,1.2rem + 1.6vw,2.2rem);line-height:1.2;margin:0 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.3rem;line-height:1.3;margin:2.75rem 0 .5rem}
h3{font-size:1.05rem;line-height:1.35;margin:1.5rem 0 .25rem;overflow-wrap:anywhere}
p,ul,ol{max-width:46rem;margin:.4rem 0 .8rem}
header p{color:var(--muted);font-size:1.05rem}
a{color:var(--link)}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;list-style:none;padding:.6rem 0;margin:1rem 0 0;
  max-width:none;border-block:1px solid var(--line)}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
li{overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:.25rem 0 1.25rem;max-width:100%}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-size:.93rem;line-height:1.4;font-variant-numeric:tabular-nums}
th,td{padding:.4rem .75rem;border-bottom:1px solid var(--line);vertical-align:top}
thead th{color:var(--muted);font-weight:600;font-size:.87rem;vertical-align:bottom;
  border-bottom:1px solid var(--muted);max-width:11rem}
td,thead th{text-align:right}
table.words td,table.words thead th,th:first-child,thead th:first-child{text-align:left}
td{white-space:nowrap}
td:has(.key){text-align:left}
table.words td{white-space:normal;min-width:5rem;max-width:24rem;overflow-wrap:break-word}
tbody th{font-weight:500;text-align:left}
th:first-child{position:sticky;left:0;background:var(--paper);z-index:1;padding-left:0}
figure{margin:0}
figcaption{font-weight:600;font-size:.95rem;margin:0 0 .35rem}
figcaption small,.note{color:var(--muted);font-weight:400;font-size:.88rem}
details{margin:.5rem 0 1rem}
summary{cursor:pointer;color:var(--link)}
img{max-width:100%;height:auto}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));gap:1.75rem 2rem;
  margin:1rem 0}
.charts svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:.35rem 1.4rem;list-style:none;padding:0;
  margin:.75rem 0;max-width:none}
.key{display:flex;gap:.5rem;width:max-content;max-width:min(18rem,42vw);text-align:left}
.legend .key{max-width:100%}
thead .key{max-width:min(9.5rem,42vw)}
.key svg{flex:none;width:2rem;height:.8rem;margin-top:.3em}
.key span{overflow-wrap:anywhere}
th code{display:block;width:max-content;max-width:min(20rem,42vw)}
figure:has(>.bars){max-width:46rem}
.bars{list-style:none;padding:0;margin:0;max-width:none;display:grid;gap:.2rem;font-size:.88rem;
  font-variant-numeric:tabular-nums}
.bars li{display:grid;grid-template-columns:minmax(4.5rem,34%) 1fr 4rem;gap:.6rem;align-items:center}
.bars .name{text-align:right;overflow-wrap:anywhere;line-height:1.25}
.bars .bar{display:block;background:var(--raised)}
.bars .bar i{display:block;height:.85rem;background:var(--bar)}
.bars .count{color:var(--muted)}
@media(max-width:40rem){
  table .key svg{width:1.4rem}
  table .key{gap:.35rem}
  h2{margin-top:2.1rem}
  th,td{padding:.35rem .55rem}
}
@media print{.scroll{overflow:visible}}
"""
)
