"""``python -m dataset.store FILE``: see `dataset.store.hdf5`."""

import sys

from dataset.cli import run
from dataset.store.hdf5 import main

sys.exit(run(main))
