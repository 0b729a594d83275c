"""Reads one large JSON object or list part by part, in megabytes of memory for a file of gigabytes.

ijson, the library for this, creates an event for each number. The standard library's parser, on a buffer that
grows until a value is complete, reads LEAF's lists of pixels several times as fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

MOST = 1 << 27
"""Most characters of one value."""
_BLOCK = 1 << 20
_SPACE = " \t\r\n"
_IN_NUMBERS = "+-.eE"
"""What may stand between the digits of a number."""


def members(path: Path, inside: str, form: str) -> Iterator[tuple[str | None, str, Any]]:
    """The members of the object that a file holds, in its order.

    Args:
        path: the file.
        inside: the member whose own members are yielded one by one, instead of as one value.
        form: whose format the file should have, for errors.

    Yields:
        ``(None, name, value)``, and for the members of ``inside`` ``(inside, name, value)``.

    Raises:
        ValueError: when the file is no JSON object, is cut off, or has a value of more than `MOST`
            characters; the message names the file.
    """
    with _text_of(path, form) as text:
        for name in text.names():
            if name == inside:
                for inner in text.names():
                    yield inside, inner, text.value()
            else:
                yield None, name, text.value()


def elements(path: Path, form: str) -> Iterator[Any]:
    """The elements of the list that a file holds; arguments and errors as for `members`."""
    with _text_of(path, form) as text:
        for _ in text.entries("[", "]"):
            yield text.value()


@contextmanager
def _text_of(path: Path, form: str) -> Iterator[_Text]:
    """The text of a file, of which nothing is left at the end."""
    with open(path, encoding="utf-8-sig") as file:
        text = _Text(file, path, form)
        try:
            yield text
            if text.peek():
                text.fail("there is text after the JSON value")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None


class _Text:
    """A file's text from a position on."""

    def __init__(self, file: IO[str], path: Path, form: str) -> None:
        self._file, self._path, self._form = file, path, form
        self._buffer, self._at, self._before = "", 0, 0
        self._decoder = json.JSONDecoder()

    def fail(self, what: str) -> NoReturn:
        raise ValueError(
            f"{self._path}: {what}, near character {self._before + self._at:,}: it is not a JSON file "
            f"in the format of {self._form}"
        )

    def _more(self) -> bool:
        """Read more text; False at the end of the file."""
        held = len(self._buffer) - self._at
        block = self._file.read(max(_BLOCK, held))
        self._before += self._at
        self._buffer, self._at = self._buffer[self._at :] + block, 0
        return bool(block)

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def _take(self, wanted: str) -> str:
        """Take the next character, which must be one of ``wanted``."""
        found = self.peek()
        if not found or found not in wanted:
            self.fail(f"it has {found or 'its end'!r} where {' or '.join(wanted)} is expected")
        self._at += 1
        return found

    def entries(self, opening: str, closing: str) -> Iterator[None]:
        """Yield once for each entry of a list or an object, which must then be taken."""
        self._take(opening)
        if self.peek() == closing:
            self._at += 1
            return
        while True:
            yield
            if self._take(f",{closing}") == closing:
                return

    def names(self) -> Iterator[str]:
        """The names of an object's members; after each, its `value`, or the `names` inside, must be taken."""
        seen: set[str] = set()
        for _ in self.entries("{", "}"):
            if self.peek() != '"':
                self.fail("a name is missing")
            name = self.value()
            if name in seen:
                self.fail(f"it has {name[:80]!r} twice")
            seen.add(name)
            self._take(":")
            yield name

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except RecursionError:
                self.fail("it is nested too deeply")
            except ValueError as error:  # also of a whole number with thousands of digits
                whole = len(self._buffer) - self._at
                if whole >= MOST:
                    self.fail(f"it has a value of more than {MOST:,} characters")
                if not self._more():
                    self.fail(f"it is damaged or cut off ({getattr(error, 'msg', error)})")
                continue
            rest = self._buffer[end : end + 3]
            if len(rest) < 3 and not rest.strip(_IN_NUMBERS) and self._more():  # a number may go on
                continue
            self._at = end
            return value
