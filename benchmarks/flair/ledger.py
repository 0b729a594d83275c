"""The privacy of one run: its mechanism, its noise seed, and ``privacy.json``."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.flair.config import Config, Tree
from pfl_ext.checkpoint import write_bytes, write_json
from pfl_ext.privacy import METRICS, private_mean
from pfl_ext.randomness import derive


class Ledger:
    """Calibrates the noise before the first round, and accounts for every round that was released.

    The seed of a private run's noise and cohorts is secret: it lies in ``checkpoint/noise_seed``, readable by
    its owner alone, so that a resumed run releases no round with a second, other noise; `close` deletes it.
    One process: several workers must be given the seed of one of them.

    :raises ValueError: when no noise keeps the budget, as `PrivacyConfig.calibrate` says.
    """

    def __init__(self, config: Config, population: int, directory: Path) -> None:
        assert config.privacy is not None
        federated = config.federated
        self.calibration = config.privacy.calibrate(population, federated.cohort_size, federated.num_rounds)
        self._path = directory / "privacy.json"
        self._seed_path = directory / "checkpoint" / "noise_seed"
        self._seeded = config.privacy.noise_seed == "run"
        secret = derive(config.seed, "secret of the run") if self._seeded else self._secret()
        self.cohort_seed = derive(secret, "cohorts")
        self.mechanism = private_mean(self.calibration, noise_seed=secret, threads=os.cpu_count() or 1)
        print(self.summary(), file=sys.stderr)

    def _secret(self) -> int:
        if not self._seed_path.exists():
            write_bytes(self._seed_path, str(secrets.randbits(128)).encode(), mode=0o600)
        try:
            return int(self._seed_path.read_text())
        except ValueError:
            raise ValueError(f"{self._seed_path} is damaged: start anew in another --run_dir") from None

    def summary(self) -> str:
        """What is promised, in one line."""
        made = self.calibration
        system, executed = made.simulated, made.executed
        text = (
            f"privacy: epsilon {made.epsilon:.3f} at delta {system.delta:.3g} for N = {system.population}, "
            f"q = {system.sampling_probability:.3g}, T = {made.num_rounds}, noise multiplier "
            f"{system.noise_multiplier:g} ({system.sampler} sampling, {system.accountant}"
            + (f", band {made.config.band})" if made.config.band > 1 else ")")
        )
        if made.is_simulation:
            text += (
                f"; SIMULATED with cohorts of {executed.cohort_size} for {system.cohort_size} and "
                f"{executed.population} users for {system.population}: "
                f"as executed, epsilon is {made.epsilon_executed:.4g}"
            )
        return text + ("; noise from the run's seed: for research only" if self._seeded else "")

    def write(self, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        """``privacy.json`` after so many rounds."""
        told = [line["privacy"] for line in history if "privacy" in line][:rounds]
        by_round: Tree = {name: [line.get(name) for line in told] for name in METRICS}
        content = self.calibration.to_json(rounds)
        write_json(self._path, {**content, "seeded_for_research_only": self._seeded, "by_round": by_round})

    def close(self) -> None:
        """After the last round: nothing is left from which the noise could be drawn again."""
        self._seed_path.unlink(missing_ok=True)
