"""What every page of ours must be: one whole file, nothing from elsewhere, readable without seeing it."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "wbr", "br", "hr", "input", "link"}
FORBIDDEN = {
    "script",
    "link",
    "iframe",
    "object",
    "embed",
    "form",
    "base",
    "audio",
    "video",
    "source",
    "image",
}
ADDRESSES = {"src", "href", "xlink:href", "srcset", "action", "poster", "background"}


@dataclass
class Element:
    """A start tag, and the text up to its end."""

    tag: str
    attributes: dict[str, str]
    words: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


class Page(HTMLParser):
    """A page as its elements in order; a tag that is not closed in turn is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"not closed: {self._open[-1]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        assert len(element.attributes) == len(attrs), f"an attribute stands twice: {element}"
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1].tag == tag, f"</{tag}> closes {self._open[-1]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.words.append(data)

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def rows(self, table: str) -> list[list[str]]:
        """The cells of the table with this title, without its head."""
        start = next(i for i, e in enumerate(self.elements) if e.attributes.get("aria-label") == table)
        rows: list[list[str]] = []
        for element in self.elements[start + 2 :]:
            if element.tag == "table":
                break
            if element.tag == "tr":
                rows.append([])
            elif element.tag in ("td", "th"):
                rows[-1].append(element.text)
        return rows[1:]


def check(text: str) -> Page:
    """Parse a page, and hold it to what is said at the top of this file."""
    assert text.startswith("<!DOCTYPE html>")
    page = Page(text)
    check_alone(page)
    check_readable(page)
    return page


def check_alone(page: Page) -> None:
    """Nothing is fetched, nothing runs, and the page forbids both."""
    assert FORBIDDEN & {element.tag for element in page.elements} == set()
    for element in page.elements:
        for name, value in element.attributes.items():
            assert not name.startswith("on"), element
            if name in ADDRESSES:
                assert value.startswith(("#", "data:image/png;base64,", "data:image/jpeg;base64,")), element
            if name == "style":
                assert re.fullmatch(r"url\(#\w+\)", value) or "url(" not in value.replace("url(#", ""), (
                    element
                )
    (style,) = [element.text for element in page.all("style")][:1]
    assert "url(" not in style
    assert "@import" not in style
    policy = [e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def check_readable(page: Page) -> None:
    """Headings in order, one of the first level; each picture in words; each id once, each link to one."""
    levels = [int(e.tag[1]) for e in page.elements if re.fullmatch("h[1-6]", e.tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))
    assert [e.attributes.get("lang") for e in page.all("html")] == ["en"]
    assert any("width=device-width" in e.attributes.get("content", "") for e in page.all("meta"))
    assert page.all("title")[0].text
    ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    links = [e.attributes["href"] for e in page.all("a")]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    for image in page.all("img"):
        assert image.attributes["alt"].strip(), image
        assert int(image.attributes["width"]) > 0
        assert int(image.attributes["height"]) > 0
    for drawing in page.all("svg"):
        shown = drawing.attributes.get("role") == "img" and drawing.attributes["aria-label"].strip()
        assert shown or drawing.attributes.get("aria-hidden") == "true", drawing
    for head in page.all("th"):
        assert head.attributes["scope"] in ("row", "col")
