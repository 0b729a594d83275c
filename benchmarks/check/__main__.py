"""Check that a training command keeps what every run promises: for an algorithm or other code of your own.

    python -m benchmarks.check benchmarks.fedcv.classification.train --federated.algorithm slowmo

The first word is the module that trains, the others are its options. It trains several times in a temporary
folder, for three rounds unless the options name a number:

* by the same command again: all numbers are the same, bit for bit;
* stopped after each round, and gone on with: the same, bit for bit;
* by pfl's own loop instead of the engine, and by two workers: the same up to rounding. All that a checkpoint
  holds may differ by 1 % of what training changed after the first round (by the norm of the difference), or
  by ten times what changes if each of the first weights is changed by a rounding. Adam with a small epsilon
  turns even a rounding of a gradient near 0 into a step: check it with an epsilon of 0.001.

A line says what was found in each. Exit codes: 0: all is kept; 1: something is not; 2: the command is wrong,
for the reason on the last line. Private runs cannot be checked: their noise is secret, so no two are equal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.check.runs import Runs, check
from benchmarks.core.commands import command_parser
from dataset.cli import run

LENGTHS = ("--federated.num_rounds", "--centralised.num_epochs")
"""The keys by which a command says how long it trains; without any, it is the first, 3."""


def main(argv: Sequence[str]) -> None:
    """Check a training command.

    Raises:
        ValueError: when the command is wrong, or cannot be checked.
        SystemExit: code 1: something is not kept.
    """
    if not argv or argv[0].startswith("-"):
        command_parser("check", __doc__).read(argv)
        raise ValueError("name the module that trains, such as benchmarks.fedcv.classification.train")
    keys = {word.partition("=")[0] for word in argv}
    if "--run_dir" in keys:
        raise ValueError("leave --run_dir out: the runs lie in a temporary folder")
    length = () if keys & {*LENGTHS} else (f"{LENGTHS[0]}=3",)
    with TemporaryDirectory() as folder:
        if not check(Runs([*argv, *length], Path(folder)), say=lambda line: print(line, flush=True)):
            sys.exit(1)


if __name__ == "__main__":
    sys.exit(run(main))
