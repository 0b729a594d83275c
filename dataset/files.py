"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``, replacing what is there in one step; OSError leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
