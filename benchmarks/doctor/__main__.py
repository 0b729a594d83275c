"""``python -m benchmarks.doctor``."""

import sys

from benchmarks.doctor.command import main
from dataset.cli import run

if __name__ == "__main__":
    sys.exit(run(main))
