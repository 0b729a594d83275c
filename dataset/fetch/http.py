"""Fetch a file over HTTP so that an interrupted download continues where it stopped.

A server may be slow, busy (429, 500 to 504), break off, send too little or too much, or have another file
under the same name. A download gets the target's name only when it has the announced length and one version
(ETag). `fetch_checked` also compares a checksum, if one is known. Apple's server has none, but its archives
have CRCs.
"""

from __future__ import annotations

import http.client
import itertools
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from dataset.cli import SourceError
from dataset.files import file_digest

_BLOCK = 1 << 20
BUSY = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Status codes after which a request may be repeated."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server. Waits double from ``pause_s``, unless it says Retry-After."""

    attempts: int = 6
    timeout_s: float = 60.0  # without a byte
    pause_s: float = 1.0
    longest_pause_s: float = 300.0

    def pause(self, attempt: int, error: BaseException | None) -> float:
        """Seconds to wait after a failed attempt, counted from 0."""
        seconds: float = self.pause_s * 2**attempt
        if isinstance(error, urllib.error.HTTPError) and error.headers.get("Retry-After"):
            seconds = retry_after(error.headers["Retry-After"], seconds)
        return min(max(seconds, 0.0), self.longest_pause_s)


PATIENCE = Patience()
"""How long every download waits for its server; tests replace it."""


def retry_after(header: str, otherwise: float) -> float:
    """Seconds from an HTTP Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3).

    By a date it is at least ``otherwise``: this machine's clock may be ahead of the server's.
    """
    if header.strip().isdigit():
        return float(header)
    try:
        return max(parsedate_to_datetime(header).timestamp() - time.time(), otherwise)
    except (ValueError, TypeError):
        return otherwise


def retried(ask: Callable[[], Result], url: str) -> Result:
    """Call ``ask()``, repeatedly while the server is busy or the connection breaks.

    Raises:
        SourceError: one line, when the attempts are used up or the server refuses.
    """
    for attempt in itertools.count(1):
        try:
            return ask()
        except (OSError, http.client.HTTPException) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                final = error.code not in BUSY
            else:  # the last two: a full disk, say
                final = isinstance(error, (SourceError, PermissionError)) or type(error) is OSError
            if final or attempt >= PATIENCE.attempts:
                kept = "the part that was downloaded is kept: run the command again later"
                raise SourceError(f"cannot download {url} ({text}); {kept}") from None
            pause = PATIENCE.pause(attempt - 1, error)
            print(f"{url}: {text}; trying again in {pause:.0f} s", file=sys.stderr)
            time.sleep(pause)
    raise AssertionError("the count has no end")


@dataclass(frozen=True)
class Remote:
    """A file on a server: its length in bytes, and its version (empty if it has none)."""

    size: int
    version: str


def below(base: str, path: str) -> str:
    """The address of a path below another address."""
    return f"{base.rstrip('/')}/{path}"


def remote(url: str) -> Remote:
    """Length and version of a remote file (a HEAD request)."""

    def ask() -> Remote:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=PATIENCE.timeout_s) as answer:
            length = answer.headers["Content-Length"] or ""
            if not length.isdigit():
                raise SourceError("the server does not say how long the file is")
            return Remote(int(length), _version(answer))

    return retried(ask, url)


def fetch(url: str, target: Path, expected: Remote) -> Path:
    """Download ``url`` to ``target``, which appears when it is complete; returns its path.

    What has arrived is kept in ``target.part``. A later call, or another attempt after a broken connection,
    requests only the rest (HTTP Range). It starts over if the server then has another version.

    Raises:
        SourceError: one line, when the attempts are used up.
    """
    if target.is_file() and target.stat().st_size == expected.size:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    noted = target.with_name(target.name + ".version")
    if not noted.exists() or noted.read_text(encoding="utf-8") != expected.version:
        part.unlink(missing_ok=True)
        noted.write_text(expected.version, encoding="utf-8")
    retried(lambda: _append(url, part, expected), url)
    part.replace(target)
    noted.unlink()
    return target


def fetch_checked(url: str, target: Path, algorithm: str, expected: str) -> None:
    """Download ``url`` to ``target``, unless it is there, and check its digest.

    Args:
        algorithm: ``md5`` or ``sha256``.
        expected: the digest in hexadecimal; an empty one is not checked.

    Raises:
        SourceError: when it cannot be downloaded. A file with another digest is deleted first, so that the
            same command downloads it again.
    """
    if not target.is_file():
        fetch(url, target, remote(url))
    if expected and (found := file_digest(target, algorithm)) != expected:
        target.unlink()
        raise SourceError(
            f"{url} was damaged in the download ({algorithm.upper()} {found}, not {expected}); run the "
            "command again"
        )


def _append(url: str, part: Path, expected: Remote) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have == expected.size:
        return
    if have > expected.size:
        part.unlink()
        have = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=PATIENCE.timeout_s) as answer:
        version = _version(answer)
        if expected.version and version and version != expected.version:
            raise SourceError("the file on the server changed during the download")
        wanted = f"bytes {have}-{expected.size - 1}/{expected.size}"
        if answer.status != 206:  # the server sends the whole file
            have = 0
        elif answer.headers["Content-Range"] not in (wanted, None):
            raise SourceError(f"the server sent {answer.headers['Content-Range']} instead of {wanted}")
        length = answer.headers["Content-Length"]
        if length is not None and int(length) != expected.size - have:
            raise SourceError(f"it now has {int(length) + have:,} bytes, but had {expected.size:,} before")
        shown = {"unit": "B", "unit_scale": True, "desc": part.stem, "leave": False}
        bar = tqdm(total=expected.size, initial=have, disable=None, **shown)  # not in a log
        with open(part, "r+b" if have else "wb") as file, bar:
            file.seek(have)
            while have < expected.size and (block := answer.read1(min(_BLOCK, expected.size - have))):
                file.write(block)
                have += len(block)
                bar.update(len(block))
            file.flush()
            os.fsync(file.fileno())
    if have < expected.size:
        raise http.client.IncompleteRead(b"", expected.size - have)


def _version(answer: http.client.HTTPResponse) -> str:
    return str(answer.headers["ETag"] or answer.headers["Last-Modified"] or "")
