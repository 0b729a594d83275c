"""Experiments: each folder is one benchmark."""

import os
import sys

# OpenMP's threads spin so often before they sleep. As fast as the default on idle cores; with the default,
# steps take many times as long as soon as other work wants the same cores.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

if sys.argv[:1] == ["-m"]:  # a command starts; dataset sees to MPLBACKEND
    from dataset import process

    process.begin()

import pfl_ext as pfl_ext  # before pfl, see there
