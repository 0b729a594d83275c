"""One of two workers that choose a network: ``network_worker DIRECTORY``; only worker 1 has internet.

Each writes the arguments that it would train with to ``DIRECTORY/RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest import mock
from urllib.error import URLError

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
from benchmarks.core.network import network_words
from benchmarks.flair.config import FLAIR
from pfl_ext.workers.distributed import connected


def main(directory: Path) -> None:
    """Choose, connected to the other worker."""
    os.environ["TORCH_HOME"] = str(directory)
    rank = os.environ["RANK"]
    unreachable = mock.patch("pfl_ext.models.download._ask", side_effect=URLError("no network"))
    reachable = mock.patch("pfl_ext.models.pretrained.download")
    with connected("cpu", threads=1, timeout=60), unreachable if rank == "0" else reachable:
        chosen = network_words(FLAIR, ["--config=fl-f-17"], lambda _: [])
    (directory / f"{rank}.json").write_text(json.dumps(chosen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
