"""Experiments: each folder is one benchmark."""

import os
import sys

# OpenMP's threads spin so often before they sleep. As fast as the default on idle cores; with the default,
# steps take many times as long as soon as other work wants the same cores.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# So do the threads of NumPy's and SciPy's BLAS, of which little is asked here: beside other work, a private
# run's statement took 3.5 s of CPU time with two threads and 0.2 s with one. And its last digits depended on
# the number of cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if sys.argv[:1] == ["-m"]:  # a command starts; dataset sees to MPLBACKEND
    from dataset import process

    process.begin()

import pfl_ext as pfl_ext  # before pfl, see there
