"""A web server of one folder that fails as it is asked to and, where asked, answers as Hugging Face's."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "227b0632" + "0" * 32
STALL_S = 1.5


@dataclass
class FaultyServer:
    """``faults[path]`` holds what befalls the next GETs of a path; when it is used up, answers are right.

    An int is a status; ``short`` breaks off in the middle; ``slow`` stalls there; ``long`` sends more than it
    announced; ``flipped`` sends one wrong byte; ``html`` sends a page instead; ``changed`` another version.
    """

    root: Path
    url: str = ""
    retry_after: str = "0"
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    state: FaultyServer

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0].lstrip("/")
        if path.startswith("api/"):
            self.listing(path)
            return
        hub = f"datasets/apple/flair/resolve/{COMMIT}/"
        path = path.removeprefix(hub)
        file = self.state.root / path
        if not file.is_file():
            self.send_error(404)
            return
        queue = self.state.faults.get(path, []) if body else []
        fault = queue.pop(0) if queue else None
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Retry-After", self.state.retry_after)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.file(file.read_bytes(), fault, body)

    def file(self, content: bytes, fault: str | None, body: bool) -> None:
        etag = hashlib.sha256(content).hexdigest()
        if fault == "html":
            content = b"<html>Please log in</html>"
        elif fault == "changed":
            content, etag = content[::-1], "other"
        elif fault == "flipped":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        wanted = self.headers["Range"]
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted and fault != "html" else 0
        if body:
            self.state.asked.append((self.path, wanted))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if fault != "html":
            self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if not body:
            return
        middle = start + (len(content) - start) // 2
        if fault in ("short", "slow"):
            self.wfile.write(content[start:middle])
            self.wfile.flush()
            if fault == "slow":
                time.sleep(STALL_S)
            self.close_connection = True
            return
        self.wfile.write(content[start:] + (b"more" if fault == "long" else b""))

    def listing(self, path: str) -> None:
        """What huggingface_hub asks: the commits, and the files of one."""
        answer: list[dict[str, Any]] = []
        if "/commits/" in path:
            common = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "title": "", "message": ""}
            answer = [{"id": "f" * 40, **common}, {"id": COMMIT, **common}]
        elif "/tree/" in path:
            for file in sorted(self.state.root.rglob("*.parquet")):
                digest, size = hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size
                lfs = {"oid": digest, "size": size, "pointerSize": 134}
                name = str(file.relative_to(self.state.root))
                answer.append({"type": "file", "path": name, "size": size, "oid": digest[:40], "lfs": lfs})
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(root: Path) -> Iterator[FaultyServer]:
    """The server of a folder, which need not hold anything yet."""
    root.mkdir(parents=True, exist_ok=True)
    state = FaultyServer(root)
    handler = type("Handler", (_Handler,), {"state": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        httpd.daemon_threads = True
        state.url = f"http://127.0.0.1:{httpd.server_port}/"
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield state
        finally:
            httpd.shutdown()
            thread.join(5)
