"""Kill -9 at random moments of a mini run, go on each time until it ends, and compare with one never killed.

    python -m tests.campaigns.kill_training --kills 50 --rounds 30 --kind all
    python -m tests.campaigns.kill_training --kills 20 --rounds 6 --kind secret --window

Half of the kills come at a random time, half at a random place: while a checkpoint is written, flushed, read
back or renamed, in evaluation, at the sum over users and the server's step, at a line of metrics.jsonl, while
results are written. What the process was at is counted. A run that survives to its end is compared (SHA-256
of model.safetensors, results.json and metrics.jsonl but for times, model and server optimiser after the last
round) and the next one begins, until the kills are used up.

Every noisy sum that a private run releases is logged, with its noise: no round may have two of them. The kind
``secret`` draws its noise from entropy, so that nothing but this log and the order of rounds can be compared.
``--window`` puts all kills between the last round and the deletion of the secret, after ``results.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dataset.cli import run
from pfl_ext import checkpoint
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import NoisyMean, PrivateMean
from tests.campaigns.kinds import COHORT, COMMON, KINDS, SPEC, subject_of
from tests.campaigns.lives import After, At, Phases, live

ROUND = "benchmarks.core.execute:train_federated"
PHASES = {
    "between rounds": (ROUND, "benchmarks.core.execute:train_centralised"),
    "taking up a checkpoint": ("benchmarks.core.recorder:Recorder.restore",),
    "reduction": (
        "pfl_ext.engine.cohort:CohortEngine.train",  # but for the users' training: the sum over them
        "pfl_ext.backend:CentrallyEvaluatedBackend._finish",  # sum over workers, noise, mean, clipping bound
        "pfl.model.pytorch:PyTorchModel.apply_model_update",
    ),
    "local training": ("pfl_ext.engine.cohort:CohortEngine._has_run",),
    "evaluation": ("pfl_ext.evaluation:CentralEvaluation.__call__",),
    "line of metrics": ("benchmarks.core.recorder:Recorder._write_line",),
    "save": ("benchmarks.core.recorder:Recorder.save",),
    "users' vectors": (
        "pfl_ext.algorithms.user_vectors:UserVectors.write",
        "pfl_ext.algorithms.user_vectors:UserVectors.tensors",
        "pfl_ext.algorithms.user_vectors:UserVectors.saved",
        "pfl_ext.algorithms.user_vectors:UserVectors.load",
    ),
    "results": ("benchmarks.core.execute:_write_results",),
}
"""What a life can be at when it ends; the innermost counts."""

PLACES = {
    "save": (
        "pfl_ext.checkpoint:save_file",
        "pfl_ext.checkpoint:sync",
        "pfl_ext.checkpoint:load",
        "pfl_ext.checkpoint:_keep",
        "pfl_ext.checkpoint:save",
        "dataset.files:write_bytes",
        "benchmarks.core.run_directory:RunDirectory.flushed",
        "os:replace",
    ),
    "evaluation": (
        "benchmarks.core.recorder:Recorder.evaluated",
        "pfl_ext.evaluation:CentralEvaluation._share",
        "pfl_ext.evaluation:CentralEvaluation._read",
    ),
    "reduction": (
        "pfl_ext.engine.trim:Trimmed.expand",
        "pfl_ext.backend:CentrallyEvaluatedBackend._finish",
        "pfl_ext.backend:get_num_params_weight_name",  # in _finish, when the mean is made
        "pfl.model.pytorch:PyTorchModel.apply_model_update",
    ),
    "the rest": (
        "benchmarks.core.recorder:Recorder._write_line",
        "benchmarks.core.recorder:Recorder.restore",
        "benchmarks.reporting.plots:training_curve",
    ),
}
"""Where lives end that do not end at a random time: one of these kinds is drawn, then one of its places."""


OF_SCAFFOLD = (
    "os:pwrite",
    "os:fsync",
    *PHASES["users' vectors"],
    "pfl_ext.algorithms.controls:Controls.end_round",
)
"""More of these, for runs that keep a vector for each user."""

WINDOW = (
    "benchmarks.core.recorder:Recorder.end",
    "benchmarks.core.execute:final_scores",
    "benchmarks.core.execute:_write_results",
    "benchmarks.reporting.plots:training_curve",
    "benchmarks.reporting.plots:privacy_curves",
    "benchmarks.core.execute:hardware",
    "benchmarks.core.execute:probe_checksum",  # its first call is before the first round
    "benchmarks.core.secret:Secret.close",
)
"""What a run does once between its last round and its end."""


def log_releases(path: Path) -> None:
    """Have this process append a line to a file for each round: its number, SHA-256 of its noise and mean."""
    real_noise, real_release = PrivateMean._noise, NoisyMean.postprocess_server
    noises: list[torch.Tensor] = []

    def noise(self: Any, *given: Any) -> Any:
        drawn = real_noise(self, *given)
        noises.append(drawn[0].clone())
        return drawn

    def release(self: Any, **given: Any) -> Any:
        stats, metrics = real_release(self, **given)
        mean = torch.cat([stats[name].reshape(-1) for name in sorted(stats)])
        parts = [hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest() for t in (noises.pop(), mean)]
        with path.open("a") as file:
            file.write(" ".join([str(given["central_context"].current_central_iteration), *parts]) + "\n")
        return stats, metrics

    cast(Any, PrivateMean)._noise = noise
    cast(Any, NoisyMean).postprocess_server = release


def check_releases(path: Path, rounds: int) -> int:
    """Rounds that were made more than once, each time with the same noise and the same noisy mean.

    :raises RuntimeError: when a round has two, or none, or when two rounds have the same noise.
    """
    made = [tuple(line.split()) for line in path.read_text().splitlines()]
    different = {number: {line[1:] for line in made if line[0] == number} for number, *_ in made}
    for number, found in different.items():
        if len(found) != 1:
            raise RuntimeError(f"{path}: round {number} was released in {len(found)} forms: {found}")
    noises = {line[1] for line in made}
    if sorted(map(int, different)) != list(range(rounds)) or len(noises) != rounds:
        raise RuntimeError(f"{path}: {len(noises)} noises in the rounds {sorted(map(int, different))}")
    return len(made) - rounds


TIMES = ("seconds", "worker_seconds")
WHEREABOUTS = ("algorithm/rows", "algorithm/rows_before", "users/rows", "users/rows_before")
"""Where users' vectors lie in their file; what they are, their digests say."""


def remember_calibrations() -> None:
    """Have `PrivacyConfig.calibrate`, a pure function, compute each answer once."""
    real, known = PrivacyConfig.calibrate, dict[str, Any]()

    def calibrate(self: PrivacyConfig, *sizes: int) -> Any:
        key = f"{self} {sizes}"
        if key not in known:
            known[key] = real(self, *sizes)
        return known[key]

    cast(Any, PrivacyConfig).calibrate = calibrate


PARTS = ("results.json", "metrics.jsonl", "privacy.json", "checkpoint's state", "checkpoint's tensors")


def outcome(directory: Path) -> tuple[Any, ...]:
    """All that a run records, without its times."""
    results = json.loads((directory / "results.json").read_text())
    del results["wall_clock_s"]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line[results["unit"]] for line in lines]
    if steps != list(range(results["rounds"] + 1)):
        raise RuntimeError(f"{directory}: a gap or a repetition in metrics.jsonl: {steps}")
    privacy = directory / "privacy.json"
    tensors, state = checkpoint.load(directory / "checkpoint" / "last.safetensors")
    del state["seconds"], state["metrics_sha256"], state["metrics_bytes"]  # of lines with times
    return (
        results,
        [{key: value for key, value in line.items() if key not in TIMES} for line in lines],
        privacy.read_text() if privacy.exists() else None,
        state,
        {
            name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
            if name not in WHEREABOUTS
        },
    )


def compare(name: str, got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Raise RuntimeError where two runs differ."""
    for part, one, other in zip(PARTS, got, expected, strict=True):
        if differences := list(_differences(one, other)):
            raise RuntimeError(f"{name}: {part} differs: {'; '.join(differences)}")


def _differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two things that JSON can write differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            yield from _differences(one.get(key, "absent"), other.get(key, "absent"), f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (each, others) in enumerate(zip(one, other)):
            yield from _differences(each, others, f"{path}/{number}")
    elif one != other:
        yield f"{path}: {one} != {other}"


class Campaign:
    """Kills of one kind of run, on one data file, in one folder."""

    def __init__(self, kind: str, rounds: int, folder: Path, seed: int, window: bool = False) -> None:
        self._rounds, self._window, self.repeated = rounds, window, 0
        self.kind, self.folder, self.phases = kind, folder / kind, Phases(PHASES)
        self._subject = subject_of(kind)
        self._data, self._log = folder / self._subject.file, self.folder / "log.txt"
        self._argv = [
            *COMMON,
            *KINDS[kind],
            f"--{'centralised.num_epochs' if kind == 'centralised' else 'federated.num_rounds'}={rounds}",
            f"--data_path={self._data}",
        ]
        self._rng = np.random.default_rng([seed, *kind.encode()])
        if not self._data.exists():
            live(self._draw, None, self._log)
        privacy = self._subject.benchmark.parse(self._argv).config.privacy
        self._private = privacy is not None
        if privacy is not None:  # the children inherit what it takes seconds to compute
            privacy.calibrate(SPEC.train_users, COHORT, rounds)
        started = time.monotonic()
        assert self._live("whole", None) == 0, f"see {self._log}"
        self._seconds = time.monotonic() - started
        self._whole = outcome(self.folder / "whole")

    def _draw(self) -> int:
        self._subject.write(self._data, self._subject.spec)
        return 0

    def _live(self, name: str, death: After | At | None) -> int | None:
        def work() -> int:
            torch.set_num_threads(1)
            if self._private:
                log_releases(self._releases(name))
            return run(self._subject.main, [*self._argv, f"--run_dir={self.folder / name}"])

        return live(work, death, self._log, self.phases)

    def _releases(self, name: str) -> Path:
        return self.folder / f"{name}.releases"

    def _death(self) -> After | At:
        if self._window:
            place = str(self._rng.choice(WINDOW))
            return At(place, 1 + place.endswith("probe_checksum"), bool(self._rng.random() < 0.5))
        if self._rng.random() < 0.5:
            return After(float(self._rng.uniform(0, 0.5 * self._seconds)))
        places = {**PLACES, **({"users": OF_SCAFFOLD} if self.kind in ("scaffold", "ditto") else {})}
        place = str(self._rng.choice(places[str(self._rng.choice(list(places)))]))
        return At(place, int(self._rng.integers(1, 7)), bool(self._rng.random() < 0.5))

    def kill(self, kills: int) -> tuple[int, Counter[str], Counter[str]]:
        """Kill so often; how many runs came to their end, what the dead were at, and what killed them.

        :raises RuntimeError: when a run fails, or ends otherwise than the one that was never killed.
        """
        runs, phases, deaths = 0, Counter[str](), Counter[str]()
        while True:
            name = f"run{runs}"
            while True:
                death = self._death() if deaths.total() < kills else None
                code = self._live(name, death)
                if code is not None:
                    break
                phases[self.phases.last] += 1
                deaths[str(death)] += 1
            if code != 0:
                raise RuntimeError(f"{self.folder / name} ended with {code}: {self._log.read_text()[-2000:]}")
            ended = outcome(self.folder / name)
            if self.kind != "secret":
                compare(name, ended, self._whole)
            if self._private:
                self.repeated += check_releases(self._releases(name), self._rounds)
            left = [str(p) for word in ("*.partial", "noise_seed") for p in (self.folder / name).rglob(word)]
            if left:
                raise RuntimeError(f"left behind: {left}")
            shutil.rmtree(self.folder / name)
            runs += 1
            if deaths.total() >= kills:
                return runs, phases, deaths


def tell(phases: Counter[str], deaths: Counter[str]) -> None:
    """Print what the dead were at, and what killed them."""
    print(f"  at work on: {', '.join(f'{phase} {n}' for phase, n in phases.most_common())}")
    for place, count in deaths.most_common():
        print(f"  {count:4d} {place}", flush=True)


def main() -> None:
    """Run the campaign and say what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kind", choices=("all", *KINDS), default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", action="store_true", help="kills between the last round and the end")
    given = parser.parse_args()
    remember_calibrations()
    kinds = list(KINDS) if given.kind == "all" else [given.kind]
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            started = time.monotonic()
            campaign = Campaign(kind, given.rounds, Path(folder), given.seed, given.window)
            runs, phases, deaths = campaign.kill(given.kills)
            same = "" if kind == "secret" else ", each equal to the run never killed"
            print(
                f"{kind}: {deaths.total()} kills over {runs} runs of {given.rounds} rounds{same}; "
                f"{campaign.repeated} rounds made again after a kill, all with the same noise and mean "
                f"({time.monotonic() - started:.0f} s)"
            )
            tell(phases, deaths)


if __name__ == "__main__":
    main()
