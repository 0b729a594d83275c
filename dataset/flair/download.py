"""Fetch a file over HTTP so that an interrupted download goes on where it stopped."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

_BLOCK = 1 << 20
_TIMEOUT_S = 60.0


def remote_size(url: str) -> int:
    """Length of a remote file in bytes (a HEAD request)."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_S) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, http.client.HTTPException, TypeError) as error:
        raise _unreachable(url, error) from None


def fetch(url: str, target: Path, size: int, attempts: int = 5) -> None:
    """Download ``url``, ``size`` bytes long, to ``target``, which appears when it is whole.

    What has arrived is kept in ``target.part``; a later call, or a further attempt after a broken connection,
    asks for the rest only (HTTP Range).

    Raises OSError, in one line, when the attempts are used up.
    """
    if target.is_file() and target.stat().st_size == size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    for attempt in range(attempts):
        try:
            _append(url, part, size)
        except (OSError, http.client.HTTPException) as error:
            gone = isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500
            if attempt + 1 == attempts or gone or getattr(error, "errno", None) is not None:
                raise _unreachable(url, error) from None
        if part.exists() and part.stat().st_size == size:
            part.replace(target)
            return
    raise OSError(f"{url} breaks off again and again; what has arrived is kept: run the command again")


def _append(url: str, part: Path, size: int) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    if have == size:
        return
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        if answer.status != 206:  # the server sends the whole file
            have = 0
        with (
            open(part, "r+b" if have else "wb") as file,
            tqdm(
                total=size, initial=have, unit="B", unit_scale=True, desc=part.stem, leave=False
            ) as progress,
        ):
            file.seek(have)
            while block := answer.read(_BLOCK):
                file.write(block)
                progress.update(len(block))
            file.flush()
            os.fsync(file.fileno())


def _unreachable(url: str, error: BaseException) -> OSError:
    return OSError(f"cannot download {url} ({error}); what has arrived is kept: run the command again later")
