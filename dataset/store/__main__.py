"""Describe a data file and check every byte of it: ``python -m dataset.store FILE``."""

import sys

from dataset.cli import run
from dataset.store.validate import main

sys.exit(run(main))
