"""Jupyter's kernel with torch imported already: ``python tests/warm.py tests.kernel WORDS...``.

As a kernel of its own would be; but matplotlib, which is imported too, has read MPLBACKEND before the kernel
sets it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import matplotlib as mpl
import pytest
from ipykernel.kernelapp import IPKernelApp

from tests import warm
from tests.launching import environment


class Kernel(IPKernelApp):
    """A kernel whose pictures go into the notebook."""

    def initialize(self, argv: list[str] | None = None) -> None:
        """As at any start."""
        super().initialize(argv)  # type: ignore[no-untyped-call]
        mpl.use(os.environ["MPLBACKEND"])


def chosen(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """From here on, ``python3`` is this kernel; its description lies in a folder."""
    place = folder / "kernels" / "python3"
    place.mkdir(parents=True)
    words = [sys.executable, warm.__file__, "tests.kernel", "-f", "{connection_file}"]
    (place / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "3", "language": "python"}))
    patch.setenv("JUPYTER_PATH", str(folder))
    wanted = environment()
    for name in warm.read_at_start(os.environ).keys() - wanted.keys():  # or it starts a fresh interpreter
        patch.delenv(name)
    for name, value in wanted.items():
        patch.setenv(name, value)


if __name__ == "__main__":
    Kernel.launch_instance()
