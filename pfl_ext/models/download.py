"""Downloads one file by torch's own function, with time limits, since that would wait for ever otherwise."""

from __future__ import annotations

import contextlib
import errno
import http.client
import queue
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import torch

ANSWER_S = 15.0
"""Seconds within which a server must answer, including the look-up of its name."""
SILENCE_S = 30.0
"""Seconds without a byte after which a download is given up."""
_NO_PLACE = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
)


class Unreachable(ValueError):
    """A file that this machine cannot download.

    Args:
        what: which file, and why.
        remedy: what its user can do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what


def download(url: str, target: Path, sha256: str, what: str, remedy: str) -> None:
    """Download a file to ``target``, complete and checked, or leave nothing there.

    Args:
        url: the file's address.
        target: its path on this machine; the folder is created.
        sha256: the SHA-256 of its content, or the first digits.
        what: a name of the file, for the error.
        remedy: what the user can do if it cannot be downloaded, for the error.

    Raises:
        Unreachable: when the server does not answer in time, breaks off, or sends other content.
        ValueError: when the file cannot be written.
    """
    try:
        _ask(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _silence_limited():
            torch.hub.download_url_to_file(url, str(target), sha256)
    except (OSError, RuntimeError, http.client.HTTPException) as fault:  # RuntimeError: wrong checksum
        if isinstance(fault, OSError) and fault.errno in _NO_PLACE:
            raise ValueError(
                f"{what} cannot be written to {target} ({fault.strerror}): make room there, or set TORCH_HOME"
            ) from fault
        reason = getattr(fault, "reason", fault)  # urllib wraps the system's error
        reason = getattr(reason, "strerror", None) or str(reason) or type(fault).__name__
        raise Unreachable(f"{what} cannot be downloaded ({reason})", remedy) from fault


def _ask(url: str) -> None:
    """Return once the server has answered that it has the file.

    It asks in a thread, since the look-up of a name has no timeout. The thread ends with the process at
    latest.

    Raises:
        OSError: when the server refuses, or does not answer within `ANSWER_S`.
    """
    answer: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_S):
                answer.put(None)
        except Exception as fault:  # raised again below
            if isinstance(fault, urllib.error.HTTPError):
                fault.close()
            answer.put(fault)

    threading.Thread(target=ask, daemon=True, name="ask for weights").start()
    try:
        fault = answer.get(timeout=ANSWER_S)
    except queue.Empty:
        raise TimeoutError(f"no answer from {urlsplit(url).hostname} in {ANSWER_S:.0f} s") from None
    if fault is not None:
        raise fault


@contextlib.contextmanager
def _silence_limited() -> Iterator[None]:
    """In this context, a socket that torch opens gives up after `SILENCE_S` without a byte."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
