"""The audit of a private head with its real users: CIFAR-10's 50,000 images, and canaries among them.

    python -m tests.campaigns.audit_head --data_path cifar10.hdf5

Users, features, first weights, local training, bound and budget are those of the recipes `head` and
`private-images` of `benchmarks.visual_classification.config`; rounds and the server's rate are what these had
when the table was made. The canaries come in addition, and the expected cohort grows with the users, as does
the server's rate, so that a user is drawn as often and moves the model as far. See
`tests.pfl_ext.auditing.heads`, and pfl_ext/PRIVACY.md for what was found.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from benchmarks.core.features import inputs_of
from benchmarks.visual_classification.config import parse
from benchmarks.visual_classification.train import VisualClassification
from dataset.cli import OneLineParser, input_file, run
from dataset.store.hdf5 import DataFile
from pfl_ext.auditing.audit import ClippedAfterAveraging, LessNoise, SameNoise, TwoThirdsOfTheNoise, audit
from pfl_ext.auditing.bounds import Finding
from pfl_ext.auditing.canaries import LONG, MakeMechanism
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import private_mean
from tests.pfl_ext.auditing.heads import BiasNotClipped, ClippedTogether, HeadGame

SMALL_RUNS, SMALL_ROUNDS, SMALL_BOUND = 300, 2, 0.1
"""With one canary and one real user. A bias that is not clipped is at most the square root of 2 long."""


@dataclass(frozen=True)
class Row:
    """A defect, and the runs that look for it."""

    make_mechanism: MakeMechanism
    canaries: int = 12_500
    """Canaries in a run, such that the expected cohort is a whole number; 1: `SMALL_RUNS` with one each."""
    runs: int = 1
    """With new coins and secrets each; more for what differs little from a sound mechanism."""
    length: float = LONG
    """Length of a canary's update, about, in multiples of the clipping bound."""


ROWS = {
    "none": Row(private_mean, runs=2),
    "clipping after averaging": Row(ClippedAfterAveraging),
    "the same noise every round": Row(SameNoise),
    "noise divided by 2": Row(LessNoise),
    "noise divided by 1.5": Row(TwoThirdsOfTheNoise, runs=2),
    "none, few long canaries": Row(private_mean, 3125, runs=3, length=100.0),
    "joined users are clipped as one": Row(ClippedTogether, 3125, runs=3, length=100.0),
    "none, a run per canary": Row(private_mean, 1),
    "the bias is not clipped": Row(BiasNotClipped, 1),
}
"""Real features are 33 long: canaries that are to stand out among them must be few and longer."""
RECIPE = (
    "--config=cifar10-fedavg",
    "--recipe=cifar10+fedavg+head+private-images",
    "--federated.num_rounds=60",
    "--server.learning_rate=8",
)


class Audits:
    """The games of one data file."""

    def __init__(self, file: DataFile, path: Path) -> None:
        experiment = VisualClassification(parse([*RECIPE, f"--data_path={path}"]), file)
        inputs = inputs_of(experiment, experiment.module(), path)
        head = inputs.module.trained_part
        assert isinstance(head, nn.Linear)
        self._config, self._head, self._real = experiment.config, head, inputs.split("train")

    def _game(self, privacy: PrivacyConfig, canaries: int, others: int, cohort: int, rounds: int) -> HeadGame:
        server, usual = self._config.server.learning_rate, self._config.federated.cohort_size
        return HeadGame(
            privacy.calibrate(canaries + others, cohort, rounds),
            others=others,
            head=self._head,
            real=self._real,
            rates=(self._config.local.learning_rate, server * cohort / usual),
        )

    def audit(self, defect: str, epsilon: float) -> Finding:
        """What is found against a defect at this claim."""
        row, federated = ROWS[defect], self._config.federated
        assert self._config.privacy is not None
        privacy, users = replace(self._config.privacy, epsilon=epsilon), int(self._real.user_offsets[-1])
        if row.canaries > 1:
            cohort = federated.cohort_size * (users + row.canaries) // users
            game, runs = self._game(privacy, row.canaries, users, cohort, federated.num_rounds), row.runs
        else:
            privacy = replace(privacy, clipping_bound=SMALL_BOUND)
            game, runs = self._game(privacy, 1, 1, 2, SMALL_ROUNDS), SMALL_RUNS
        return audit(replace(game, make_mechanism=row.make_mechanism, length=row.length), runs)


def main(argv: Sequence[str]) -> None:
    """Print a row of the table for each defect."""
    parser = OneLineParser(prog="python -m tests.campaigns.audit_head", description=__doc__)
    parser.add_argument("--data_path", type=Path, required=True)
    parser.add_argument("--claims", nargs="+", type=float, default=[1.0, 2.0, 3.0, 8.0], metavar="EPSILON")
    parser.add_argument("--defect", default="", metavar="WORDS", help="only those whose name has these words")
    given = parser.parse_args(argv)
    if not all(0 < claim < float("inf") for claim in given.claims):
        raise ValueError("--claims: give numbers above 0")
    names = [name for name in ROWS if given.defect in name]
    if not names:
        raise ValueError(f"--defect: no name has the words {given.defect!r}; choose from {'; '.join(ROWS)}")
    with DataFile(input_file("--data_path", given.data_path)) as file:
        audits = Audits(file, given.data_path)
        print("| defect | " + " | ".join(f"claim {claim:g}" for claim in given.claims) + " | CPU seconds |")
        print("|---|" + "---|" * (len(given.claims) + 1), flush=True)
        for name in names:
            start = time.process_time()
            print(f"| {name} |", end="", flush=True)
            for claim in given.claims:
                found = audits.audit(name, claim)
                cell = f" {'**yes**' if found.convicted else 'no'}, {found.epsilon:.2f} |"
                print(cell, end="", flush=True)
            print(f" {time.process_time() - start:.0f} |", flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
