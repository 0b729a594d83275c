"""The privacy of one run: its mechanism, what it spends, and ``privacy.json``."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.core.config.sections import PrivacySection, TrainingConfig
from benchmarks.core.config.trees import Tree
from benchmarks.core.privacy_statement import (
    SUBTRACTABLE,
    ProtectedUnit,
    central_paragraph,
    describe_epsilon,
    local_paragraph,
    not_covered,
    weak_delta,
)
from benchmarks.core.secret import Secret, statement_path
from dataset.files import write_json
from pfl_ext.checkpoint import read_json
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.privacy.accounting import Calibration, accounted_rounds, finite
from pfl_ext.privacy.central import METRICS, NoisyMean, private_mean
from pfl_ext.privacy.local import LocallyPrivateMean
from pfl_ext.workers.distributed import is_main

PUBLIC_METRICS = ("clipping bound", "noise std. dev. on the mean", "noisy fraction unclipped")
"""The metrics of a private round that are differentially private, or known beforehand: the noisy fraction's
noise is in the budget, and the bound follows from it."""
PUBLIC_LINE = ("learning_rate", "val", "tracked", "privacy", "epsilon")
"""What a line of metrics.jsonl holds in public mode, besides its number."""
PUBLIC_RESULTS = (
    "setting", "classes", "dataset", "seed", "rounds", "unit", "val", "test", "tracked", "last", "best_step",
    "unaveraged", "score_kinds", "per_class_ap", "per_class_ap50", "per_class_accuracy", "per_class_iou",
    "per_class_dice", "per_class_sensitivity", "per_class_specificity", "confusion", "prevalence", "per_user",
    "weights", "own_code", "parameters", "trainable_parameters", "norm", "start_probe", "hardware",
    "arithmetic", "commit", "torch", "config_sha256", "model_sha256", "model_probe",
)  # fmt: skip
"""What results.json holds in public mode: the model, and what it scores on users who did not train it."""


@lru_cache(maxsize=4)
def calibrated(privacy: PrivacySection, population: int, cohort_size: int, num_rounds: int) -> Calibration:
    """`PrivacyConfig.calibrate`, a pure function that takes seconds, computed once.

    Raises:
        ValueError: when no noise keeps the budget, or a public release would be of a simulated guarantee.
    """
    calibration = privacy.calibrate(population, cohort_size, num_rounds)
    if privacy.release == "public" and calibration.is_simulation:
        raise ValueError(
            "privacy.release public needs a guarantee of this run, but privacy.noise_cohort_size or "
            "privacy.noise_population simulates a larger system: set both to none"
        )
    return calibration


class Ledger(ABC):
    """Accounts for every round that was released; owner of ``privacy.json``.

    It also says what may be written: `line` and `results` pass everything, or in public mode only what is
    differentially private or independent of the training images.
    """

    mechanism: NoisyMean

    def __init__(self, config: TrainingConfig, unit: ProtectedUnit, secret: Secret, directory: Path) -> None:
        self.secret, self.unit = secret, unit
        self.is_public = config.privacy is not None and config.privacy.release == "public"
        self._run_config = config
        self._path = statement_path(directory)
        self._counted = 0  # rounds that the file counts
        self._released = 0
        if is_main() and self._path.exists() and not secret.is_public:
            self._released = int(read_json(self._path).get("rounds_done", 0))

    def state(self) -> Tree:
        """What a checkpoint must hold."""
        return {**self.mechanism.state(), "secret_sha256": self.secret.sha256}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`.

        Raises:
            ValueError: when it is not one, or was written with another secret.
        """
        of_mechanism = dict(state)
        self.secret.check(of_mechanism.pop("secret_sha256", None))
        self.mechanism.load_state(of_mechanism)

    def epsilons(self, rounds: int) -> Tree:
        """What a scored line of metrics.jsonl says of its model, which has this many updates.

        ``epsilon`` is the run's own, and ``simulated_epsilon`` that of the larger system whose noise is
        simulated, if one is. Rounds are counted as in ``privacy.json``, never too few. An infinite epsilon is
        left out.
        """
        counted = accounted_rounds(rounds, self._run_config.federated.num_rounds)
        return {key: value for key, value in self._epsilons(counted).items() if np.isfinite(value)}

    @abstractmethod
    def _epsilons(self, counted: int) -> dict[str, float]:
        """The epsilons of `epsilons` after exactly so many rounds."""

    def line(self, number: str, line: Tree) -> Tree:
        """What of a line of metrics.jsonl may be written; ``number`` is the key of the round's number."""
        if not self.is_public:
            return line
        public = {key: value for key, value in line.items() if key in (number, *PUBLIC_LINE)}
        if "privacy" in public:
            public["privacy"] = {k: v for k, v in public["privacy"].items() if k in PUBLIC_METRICS}
        return public

    def results(self, results: Tree) -> Tree:
        """What of results.json may be written; never which users of val or test are training users too."""
        allowed = PUBLIC_RESULTS if self.is_public else results.keys() - {"clients"}
        return {k: v for k, v in results.items() if k in allowed}

    @abstractmethod
    def _summary(self) -> str:
        """What is promised, in one line."""

    def _warning(self) -> str | None:
        """What is weak about it, if anything is."""
        return None

    @abstractmethod
    def _content(self, rounds: int) -> Tree:
        """What ``privacy.json`` says of the guarantee after so many rounds."""

    @abstractmethod
    def paragraph(self) -> str:
        """The guarantee after the last round, for a paper."""

    def announce(self) -> None:
        """Say on stderr what is promised."""
        research = "; noise from the run's seed: for research only" if self.secret.is_public else ""
        if is_main():
            print(self._summary() + research, file=sys.stderr)
            if warning := self._warning():
                print(f"WARNING: {warning}", file=sys.stderr)

    def warn_of_noise(self) -> None:
        """Say on stderr, after a round, where noise is longer than all rounds' updates together can be."""
        rounds, ratio = self._run_config.federated.num_rounds, self.mechanism.greatest_ratio
        over_all = ratio * np.sqrt(rounds)  # updates may all point one way, and independent noise does not
        central = self._run_config.privacy
        if is_main() and (central is None or central.band == 1) and over_all < 1:
            tqdm.write(  # on a line of its own, beside the bar of the rounds
                f"WARNING: the noise of a round is {1 / ratio:,.3g} times as long as the largest "
                f"possible mean update, and that of all {rounds:,} rounds {1 / over_all:,.3g} times as "
                "long as all updates together: the model may learn hardly anything. Use larger cohorts, a "
                "larger epsilon, or fewer trained parameters (a smaller network, or model.trained)",
                file=sys.stderr,
            )

    def cover(self, rounds: int, history: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """See that ``privacy.json`` counts so many rounds, before anything of the last of them is written."""
        if rounds > self._counted:
            self.write(rounds, history())

    def write(self, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        """``privacy.json`` after so many rounds, or after more where a kill undid released ones."""
        rounds = self._released = max(rounds, self._released)
        self._counted = accounted_rounds(rounds, self._run_config.federated.num_rounds)
        lines = [line["privacy"] for line in history if "privacy" in line][:rounds]
        names = PUBLIC_METRICS if self.is_public else METRICS
        ended = rounds == self._run_config.federated.num_rounds
        content = {
            **({"paragraph": self.paragraph()} if ended else {}),
            "unit": str(self.unit),
            **self._content(rounds),
            "seeded_for_research_only": self.secret.is_public,
            **({} if self.secret.is_public else {"secret_sha256": self.secret.sha256}),
            "by_round": {name: [line.get(name) for line in lines] for name in names},
        }
        write_json(self._path, content)


class CentralLedger(Ledger):
    """The ledger of a run with ``privacy``: calibrates the noise before the first round.

    Raises:
        ValueError: when no noise keeps the budget, as `PrivacyConfig.calibrate` says, or when
            ``privacy.release`` is public and something is simulated or seeded.
    """

    def __init__(
        self, config: TrainingConfig, population: int, unit: ProtectedUnit, secret: Secret, directory: Path
    ) -> None:
        assert config.privacy is not None
        super().__init__(config, unit, secret, directory)
        federated = config.federated
        self.calibration = calibrated(config.privacy, population, federated.cohort_size, federated.num_rounds)
        threads = os.cpu_count() or 1
        lost = 0.0 if config.devices is None else config.devices.drop_out
        self.mechanism = private_mean(
            self.calibration, reporting=1 - lost, noise_seed=secret.noise_seed, threads=threads
        )
        self.announce()

    def _summary(self) -> str:
        calibration, noun = self.calibration, self.unit.noun
        system, executed = calibration.simulated, calibration.executed
        check = (
            "" if system.accountant == "rdp" else f" (by RDP, a looser check, {calibration.epsilon_rdp:.3f})"
        )
        text = (
            f"privacy: epsilon {calibration.epsilon:.3f}{check} at delta {system.delta:.3g} for N = "
            f"{system.population}, q = {system.sampling_probability:.3g}, T = {calibration.num_rounds}, "
            f"noise multiplier {system.noise_multiplier:g} ({system.sampler} sampling, {system.accountant}"
            + (f", band {calibration.config.band}); " if calibration.config.band > 1 else "); ")
            + f"the unit is {self.unit}"
        )
        if calibration.is_simulation:
            text += (
                f"; SIMULATED with cohorts of {executed.cohort_size} for {system.cohort_size} and "
                f"{executed.population} {noun}s for {system.population}: as executed, "
                f"{describe_epsilon(calibration.epsilon_executed)}; set privacy.noise_cohort_size and "
                "privacy.noise_population to none for a guarantee of this run"
            )
        return text

    def _warning(self) -> str | None:
        system = self.calibration.simulated
        origin = f" (N^-1.1 of {system.population:,} {self.unit.noun}s, unless privacy.delta is given)"
        return weak_delta(system.delta, "privacy.delta", origin)

    def _epsilons(self, counted: int) -> dict[str, float]:
        calibration = self.calibration
        simulated = {"simulated_epsilon": calibration.simulated.epsilon_after(counted)}
        executed = calibration.executed.epsilon_after(counted)
        return {"epsilon": executed, **(simulated if calibration.is_simulation else {})}

    def _five_runs(self) -> str:
        system = self.calibration.simulated
        epsilon = describe_epsilon(system.epsilon_of_runs(5, self.calibration.num_rounds))
        return epsilon + (" for the simulated system" if self.calibration.is_simulation else "")

    def _content(self, rounds: int) -> Tree:
        calibration = self.calibration
        warning = self._warning()
        return {
            "kind": "central",
            **calibration.to_json(rounds, self.unit.noun),
            **({"claim": SUBTRACTABLE} if self.secret.is_public else {}),
            **({"warning": warning} if warning else {}),
            "not_covered": not_covered(self._run_config, self.unit, self.secret.is_public, self._five_runs()),
        }

    def paragraph(self) -> str:
        """See `central_paragraph`."""
        sent = self._run_config.federated.chosen.sends
        return central_paragraph(self.calibration, self.unit, self.secret.is_public, sent)


class LocalLedger(Ledger):
    """The ledger of a run with ``local_privacy``: counts how often each user takes part."""

    def __init__(
        self,
        config: TrainingConfig,
        users: FederatedImageDataset,
        unit: ProtectedUnit,
        secret: Secret,
        directory: Path,
    ) -> None:
        assert config.local_privacy is not None
        super().__init__(config, unit, secret, directory)
        self.config, self._federated, self._users = config.local_privacy, config.federated, users
        self._known = {0: 0}  # what `_most` has found
        self._start_counting()
        self.mechanism = LocallyPrivateMean(
            self.config, self._federated.num_rounds, noise_seed=secret.noise_seed, threads=os.cpu_count() or 1
        )
        self._most_at_end = self._most(self._federated.num_rounds)
        self.announce()

    def _start_counting(self) -> None:
        self._counts, self._drawn = np.zeros(self._users.num_users, np.int64), 0

    def _most(self, rounds: int) -> int:
        """Participations of the user who takes part most in the first rounds, whether or not it reports."""
        if rounds in self._known:
            return self._known[rounds]
        if rounds < self._drawn:
            self._start_counting()
        for round_number in range(self._drawn, rounds):
            self._counts[self._users.draw_cohort(self._federated.cohort_size, round_number)] += 1
        self._drawn, self._known[rounds] = rounds, int(self._counts.max())
        return self._known[rounds]

    def _epsilons(self, counted: int) -> dict[str, float]:
        """The epsilon of the user who took part most."""
        return {"epsilon": self._epsilon(self._most(counted))}

    def _epsilon(self, participations: int) -> float:
        return self.config.epsilon_after(participations, self.config.delta)

    def _summary(self) -> str:
        most = self._most_at_end
        return (
            f"privacy: LOCAL, {self.config.mechanism}, epsilon {self.config.epsilon:g} of each update"
            + (f" at delta {self.config.delta:.3g}" if self.config.mechanism == "gaussian" else "")
            + f"; the {self.unit.noun} who takes part most, in {most} of {self._federated.num_rounds} "
            f"rounds, spends {describe_epsilon(self._epsilon(most))} at delta {self.config.delta:.3g}; the "
            f"unit is one update of {self.unit}"
        )

    def _warning(self) -> str | None:
        gaussian = self.config.mechanism == "gaussian"
        return weak_delta(self.config.delta, "local_privacy.delta") if gaussian else None

    def _content(self, rounds: int) -> Tree:
        counted = accounted_rounds(rounds, self._federated.num_rounds)
        warning = self._warning()
        done, end = self._most(counted), self._most_at_end
        noun = self.unit.noun
        return {
            "kind": "local",
            "config": asdict(self.config),
            "unit": f"one update of {self.unit}",
            "neighbouring_relation": f"any two updates of a {noun}",
            "claim": "each update is private before it leaves its device, against the server too; the "
            f"epsilon of a {noun} adds up over the rounds in which it takes part, and sampling takes nothing "
            "off it",
            **({"claim": SUBTRACTABLE} if self.secret.is_public else {}),
            "num_rounds": self._federated.num_rounds,
            "rounds_done": rounds,
            "epsilon_spent_counts_rounds": counted,
            "delta": self.config.delta,
            "noise_multiplier": self.config.noise_multiplier,
            "epsilon_of_one_participation": self.config.epsilon,
            "participations_at_most": {"so_far": done, "at_end": end},
            "accountant": "pld",
            "accountant_version": f"dp-accounting {version('dp-accounting')}",
            "is_simulation": False,
            "epsilon_spent": finite(self._epsilon(done)),
            "epsilon_at_end": finite(self._epsilon(end)),
            **({"warning": warning} if warning else {}),
            "not_covered": not_covered(self._run_config, self.unit, self.secret.is_public),
        }

    def paragraph(self) -> str:
        """See `local_paragraph`."""
        most, rounds = self._most_at_end, self._federated.num_rounds
        spent, public = self._epsilon(most), self.secret.is_public
        sent = self._federated.chosen.sends
        return local_paragraph(self.config, self.unit, rounds, most, spent, public, sent)


def open_ledger(
    config: TrainingConfig, users: FederatedImageDataset, unit: ProtectedUnit, secret: Secret, directory: Path
) -> Ledger:
    """The ledger of a private run, which says on stderr what is promised."""
    if config.privacy is not None:
        return CentralLedger(config, len(users.partition.user_ids), unit, secret, directory)
    return LocalLedger(config, users, unit, secret, directory)
