"""The privacy of one run: its mechanism, what it spends, and ``privacy.json``."""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.secret import Secret
from benchmarks.sections import TrainingConfig
from benchmarks.settings import Tree
from pfl_ext.checkpoint import write_json
from pfl_ext.distributed import is_main
from pfl_ext.federated_dataset import FederatedImageDataset
from pfl_ext.privacy import METRICS, NoisyMean, private_mean
from pfl_ext.privacy_local import LocallyPrivateMean


class Ledger(ABC):
    """Accounts for every round that was released; owner of ``privacy.json``."""

    mechanism: NoisyMean

    def __init__(self, secret: Secret, directory: Path) -> None:
        self.secret = secret
        self._path = directory / "privacy.json"

    def state(self) -> Tree:
        """What a checkpoint must hold."""
        return {**self.mechanism.state(), "secret_sha256": self.secret.sha256}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`.

        Raises:
            ValueError: when it is not one, or was written with another secret.
        """
        own = dict(state)
        self.secret.check(own.pop("secret_sha256", None))
        self.mechanism.load_state(own)

    @abstractmethod
    def _summary(self) -> str:
        """What is promised, in one line."""

    @abstractmethod
    def _content(self, rounds: int) -> Tree:
        """What ``privacy.json`` says of the guarantee after so many rounds."""

    def announce(self) -> None:
        """Tell on stderr what is promised."""
        text = self._summary() + (
            "; noise from the run's seed: for research only" if self.secret.is_public else ""
        )
        if is_main():
            print(text, file=sys.stderr)

    def write(self, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        """``privacy.json`` after so many rounds."""
        told = [line["privacy"] for line in history if "privacy" in line][:rounds]
        by_round: Tree = {name: [line.get(name) for line in told] for name in METRICS}
        content = self._content(rounds)
        write_json(
            self._path, {**content, "seeded_for_research_only": self.secret.is_public, "by_round": by_round}
        )


class CentralLedger(Ledger):
    """Of a run with ``privacy``: calibrates the noise before the first round.

    :raises ValueError: when no noise keeps the budget, as `PrivacyConfig.calibrate` says.
    """

    def __init__(self, config: TrainingConfig, population: int, secret: Secret, directory: Path) -> None:
        assert config.privacy is not None
        super().__init__(secret, directory)
        federated = config.federated
        self.calibration = config.privacy.calibrate(population, federated.cohort_size, federated.num_rounds)
        threads = os.cpu_count() or 1
        self.mechanism = private_mean(self.calibration, noise_seed=secret.noise_seed, threads=threads)
        self.announce()

    def _summary(self) -> str:
        made = self.calibration
        system, executed = made.simulated, made.executed
        check = "" if system.accountant == "rdp" else f" (by RDP, as a check, {made.epsilon_rdp:.3f})"
        text = (
            f"privacy: epsilon {made.epsilon:.3f}{check} at delta {system.delta:.3g} for "
            f"N = {system.population}, q = {system.sampling_probability:.3g}, T = {made.num_rounds}, "
            f"noise multiplier {system.noise_multiplier:g} ({system.sampler} sampling, {system.accountant}"
            + (f", band {made.config.band})" if made.config.band > 1 else ")")
        )
        if made.is_simulation:
            text += (
                f"; SIMULATED with cohorts of {executed.cohort_size} for {system.cohort_size} and "
                f"{executed.population} users for {system.population}: "
                f"as executed, epsilon is {made.epsilon_executed:.4g}"
            )
        return text

    def _content(self, rounds: int) -> Tree:
        return {"kind": "central", **self.calibration.to_json(rounds)}


class LocalLedger(Ledger):
    """Of a run with ``local_privacy``: counts how often each user takes part."""

    def __init__(
        self, config: TrainingConfig, users: FederatedImageDataset, secret: Secret, directory: Path
    ) -> None:
        assert config.local_privacy is not None
        super().__init__(secret, directory)
        self.config, self._federated, self._users = config.local_privacy, config.federated, users
        self._counts, self._counted = np.zeros(len(users.partition.user_ids), np.int64), 0
        self.mechanism = LocallyPrivateMean(
            self.config,
            self._federated.num_rounds,
            noise_seed=secret.noise_seed,
            threads=os.cpu_count() or 1,
        )
        self._most_at_end = self._most(self._federated.num_rounds)
        self.announce()

    def _most(self, rounds: int) -> int:
        """Participations of the user who takes part most in the first rounds."""
        if rounds < self._counted:
            self._counts, self._counted = np.zeros_like(self._counts), 0
        for round_number in range(self._counted, rounds):
            self._counts[self._users.cohort(self._federated.cohort_size, round_number)] += 1
        self._counted = rounds
        return int(self._counts.max())

    def _epsilon(self, participations: int) -> float:
        return self.config.epsilon_after(participations, self.config.delta)

    def _summary(self) -> str:
        most = self._most_at_end
        return (
            f"privacy: LOCAL, {self.config.mechanism}, epsilon {self.config.epsilon:g} of each update"
            + (f" at delta {self.config.delta:.3g}" if self.config.mechanism == "gaussian" else "")
            + f"; the user who takes part most, in {most} of {self._federated.num_rounds} rounds, spends "
            f"{self._epsilon(most):.4g} at delta {self.config.delta:.3g}"
        )

    def _content(self, rounds: int) -> Tree:
        done, end = self._most(rounds), self._most_at_end
        spent = {"spent": self._epsilon(done), "at_end": self._epsilon(end)}
        return {
            "kind": "local",
            "config": asdict(self.config),
            "unit": "one update of one user, made of all of their images",
            "neighbouring_relation": "any two updates of a user",
            "claim": "each update is private before it leaves its device, against the server too; a user's "
            "epsilon adds up over the rounds in which it takes part, and sampling takes nothing off it",
            "num_rounds": self._federated.num_rounds,
            "rounds_done": rounds,
            "delta": self.config.delta,
            "noise_multiplier": self.config.noise_multiplier,
            "epsilon_of_one_participation": self.config.epsilon,
            "participations_at_most": {"so_far": done, "at_end": end},
            "accountant": "pld",
            "accountant_version": f"dp-accounting {version('dp-accounting')}",
            "is_simulation": False,
            **{f"epsilon_{key}": value if math.isfinite(value) else None for key, value in spent.items()},
            "not_covered": "metrics of the run (losses, norms, fraction clipped, signal-to-noise) are exact",
        }


def open_ledger(
    config: TrainingConfig, users: FederatedImageDataset, secret: Secret, directory: Path
) -> Ledger:
    """The ledger of a private run."""
    if config.privacy is not None:
        return CentralLedger(config, len(users.partition.user_ids), secret, directory)
    return LocalLedger(config, users, secret, directory)
