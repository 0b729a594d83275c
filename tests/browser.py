"""A real browser for tests of pages: Chromium without a window, driven by playwright.

Tests that ask for one are skipped, with the reason, where there is none: ``apt-get install chromium``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


@dataclass
class Seen:
    """A page as the browser has it."""

    page: Any
    width: int
    """The window's, in pixels."""
    scheme: str
    requests: list[str]
    messages: list[str]

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, which the driver evaluates; the page has no script."""
        return self.page.evaluate(expression)


def chromium() -> str:
    """The path of a browser; skips the test where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    return found


@contextmanager
def opened(*paths: Path) -> Iterator[Iterator[Seen]]:
    """Open each file with no network, in a window that takes each width in each theme in turn."""
    executable = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield (seen for path in paths for seen in windows(browser, path))
        browser.close()


def windows(browser: Any, path: Path) -> Iterator[Seen]:
    """The file as the browser shows it to somebody who has seen no other page."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.set_default_timeout(0)  # pytest has one, for slower machines than playwright's half a minute
    requests, messages = list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    for number, (width, scheme) in enumerate(product(WIDTHS, SCHEMES)):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        if not number:
            page.goto(path.resolve().as_uri())
        yield Seen(page, width, scheme, requests, messages)
    context.close()


LUMINANCE = """colour => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number)
    .map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; }"""
"""Relative luminance of a colour, by WCAG 2.2."""


COLOURS = """luminance => {
  const first = ['body', 'header p', 'a', 'th', '.note'].map(s => document.querySelector(s)).filter(e => e);
  const paper = getComputedStyle(document.body).backgroundColor;
  return [paper, ...first.map(e => getComputedStyle(e).color)].map(luminance); }"""
"""The luminance of the page, and those of its letters."""


def check_seen(path: Path) -> None:
    """In every window nothing is fetched or complained of, it need not be moved sideways, and letters stand
    out."""
    with opened(path) as every:
        for seen in every:
            check_window(seen, path)


def check_window(seen: Seen, path: Path) -> None:
    assert seen.ask("document.documentElement.scrollWidth") <= seen.width
    assert [url for url in seen.requests if not url.startswith("data:")] == [path.resolve().as_uri()]
    assert seen.messages == []
    assert seen.ask("[...document.querySelectorAll('img')].every(i => { i.loading = 'eager'; return 1 })")
    seen.page.wait_for_function("[...document.images].every(i => i.complete)")
    assert seen.ask("[...document.images].every(i => i.naturalWidth > 0)")
    small = "[...document.querySelectorAll('figure svg, img')].filter(e => !e.closest('details'))"
    sizes = seen.ask(f"{small}.map(e => e.getBoundingClientRect().width)")
    assert all(1 < size <= seen.width for size in sizes)
    cells = "[...document.querySelectorAll('th, td')].filter(c => c.scrollWidth > c.clientWidth + 1)"
    assert seen.ask(f"{cells}.map(c => c.textContent)") == []
    paper, *letters = seen.ask(f"({COLOURS})({LUMINANCE})")
    assert (paper < 0.1) == (seen.scheme == "dark")
    for ink in letters:
        low, high = sorted((paper, ink))
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG's least contrast of text
