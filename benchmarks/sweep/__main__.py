"""``python -m benchmarks.sweep``: see `benchmarks.sweep.command`."""

import sys

from benchmarks.sweep.command import main
from dataset.cli import run

sys.exit(run(main))
