"""``python -m dataset.store FILE``: see `dataset.store.validate`."""

import sys

from dataset.cli import run
from dataset.store.validate import main

sys.exit(run(main))
