"""``python -m dataset.flair.hdf5 FILE``, the same as ``python -m dataset.store FILE``."""

import sys

from dataset.cli import run
from dataset.store.validate import main

if __name__ == "__main__":
    sys.exit(run(main))
