"""Reads the members of one large JSON object one by one, in megabytes of memory for a file of gigabytes.

ijson, the library for this, creates an event for each number. The standard library's parser, on a buffer that
grows until a value is complete, reads LEAF's lists of pixels several times as fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

MOST = 1 << 27
"""Most characters of one value."""
_BLOCK = 1 << 20
_SPACE = " \t\r\n"
_IN_NUMBERS = "+-.eE"
"""What may stand between the digits of a number."""


def members(path: Path, inside: str) -> Iterator[tuple[str | None, str, Any]]:
    """The members of the object that a file holds, in its order.

    Args:
        path: the file.
        inside: the member whose own members are yielded one by one, instead of as one value.

    Yields:
        ``(None, name, value)``, and for the members of ``inside`` ``(inside, name, value)``.

    Raises:
        ValueError: when the file is no JSON object, is cut off, or has a value of more than `MOST`
            characters; the message names the file.
    """
    with open(path, encoding="utf-8-sig") as file:
        text = _Text(file, path)
        try:
            for name in text.names():
                if name == inside:
                    for inner in text.names():
                        yield inside, inner, text.value()
                else:
                    yield None, name, text.value()
            if text.peek():
                text.fail("there is text after the JSON object")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None


class _Text:
    """A file's text from a position on."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file, self._path = file, path
        self._buffer, self._at, self._before = "", 0, 0
        self._decoder = json.JSONDecoder(parse_constant=self._refuse_constant)

    def fail(self, what: str) -> NoReturn:
        raise ValueError(
            f"{self._path}: {what}, near character {self._before + self._at:,}: it is not a JSON file "
            "in the format of LEAF"
        )

    def _refuse_constant(self, name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number in JSON")

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

    def names(self) -> Iterator[str]:
        """The names of an object's members; after each, its `value`, or the `names` inside, must be taken."""
        self._take("{")
        if self.peek() == "}":
            self._at += 1
            return
        seen: set[str] = set()
        while True:
            if self.peek() != '"':
                self.fail("a name is missing")
            name = self.value()
            if name in seen:
                self.fail(f"it has {name[:80]!r} twice")
            seen.add(name)
            self._take(":")
            yield name
            if self._take(",}") == "}":
                return

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except RecursionError:
                self.fail("it is nested too deeply")
            except ValueError as error:
                whole = len(self._buffer) - self._at
                if whole >= MOST:
                    self.fail(f"it has a value of more than {MOST:,} characters")
                if not self._more():
                    what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                    self.fail(f"it is damaged or cut off ({what})")
                continue
            if not self._buffer[end:].strip(_IN_NUMBERS) and self._more():  # a number may go on
                continue
            self._at = end
            return value
