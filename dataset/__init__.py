"""Where data comes from and how it lies on disk. Knows files and annotations, nothing of training."""

import os
import sys

if sys.argv[:1] == ["-m"]:  # a command starts: its pictures are files, whatever MPLBACKEND says
    os.environ["MPLBACKEND"] = "agg"
