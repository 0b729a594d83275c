"""Options drawn at random: what is not refused in one line trains, and goes on after a kill as before it.

    python -m tests.campaigns.combinations --draws 9 --state FILE [--seed 0] [--only flair] [--algorithm moon]

A draw is a benchmark, an algorithm and other keys of a run's config, with values of the privacy matrix'
tests, so that new keys take part by themselves. Keys that the config refuses beside the others are left out.
Four runs of each draw:

* whole;
* killed after its first checkpoint and begun again: all that it records is the same, bit for bit;
* by pfl's own loop, and by two workers: the model is the same but for rounding, and so are all counts. Where
  rounding decides what happens (signs, medians, largest values), differences are only counted.

A finding is a difference, an exception, or an error of several lines. Draw n is a function of (seed, n). With
``--state`` the same command goes on where it was broken off.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.core import execute
from dataset.cli import run
from dataset.files import write_json
from pfl_ext.algorithms.algorithm import ALGORITHMS
from tests.benchmarks.sparing import sparingly
from tests.campaigns.drawn_options import COMMON, SUBJECTS, WITHOUT, drawn, joined
from tests.campaigns.kill_training import compare, outcome, remember_calibrations
from tests.campaigns.lives import At, as_two_workers, live

BY_ROUNDING = (
    "sign top_k median krum trimmed bulyan adam yogi adagrad ifca fedma cutout random_erasing rand_augment"
)
"""Parts of words with which rounding decides what happens: where pixels are all alike, as in a hidden square,
it also decides which of a max pool's equal values is the largest."""
NEAR = 1e-2
"""Largest distance of the engines' models, relative to how far training has moved them."""
OTHER_SEEDS = ("4", "5")
"""Seeds that are tried where the models are farther apart: a ReLU that rounding turns has this effect with
few seeds, an error with all."""
STOCK, TWO = "stock", "two"
"""Runs of another kind: by pfl's own loop, by two workers."""
VERDICTS = ("refused", "fine", "rounding", "finding")
DATA = "data"
"""The folder of data files, and the first letters of other such folders."""
FIRST = ".first"
"""Suffix of the file of a run's first model."""
KILL = At("benchmarks.core.recorder:Recorder.save", 1, False)


class Campaign:
    """Draws, one after another, in one folder."""

    draw = staticmethod(drawn)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log.txt"

    def write(self, subject: str, path: Path) -> None:
        """The subject's data file."""
        SUBJECTS[subject].write(path, SUBJECTS[subject].spec)

    def _data(self, path: Path) -> Path:
        if not path.exists():

            def write() -> int:
                path.parent.mkdir(exist_ok=True)
                self.write(path.stem, path)
                return 0

            live(write, None, self.log)
            for look in ("probe", "check_columns"):  # `sparingly`: the lives know the answer
                vars(execute)[look](path)
        return path

    def live(
        self,
        subject: str,
        words: Sequence[str],
        name: str,
        death: At | None = None,
        prepare: Callable[[], None] = lambda: None,
        data: str = DATA,
    ) -> int | None:
        """The exit code of a run with these words, in the folder ``name``; None if it was killed.

        Args:
            subject: of `SUBJECTS`.
            words: beside the subject's own.
            name: of the folder; runs whose names begin with `TWO` have two workers.
            death: when the run is killed.
            prepare: is called in the process of the run, before it.
            data: name of the folder of the data file.
        """
        argv, path = self._argv(subject, words), self._data(self.folder / data / f"{subject}.hdf5")

        def work() -> int:
            torch.set_num_threads(1)
            prepare()
            os.chdir(path.parent)  # so that no path says which data it is
            directory = f"--run_dir={self.folder / name}"
            return run(SUBJECTS[subject].main, [*argv, f"--data_path={path.name}", directory])

        self.log.unlink(missing_ok=True)
        return live(partial(as_two_workers, work) if name.startswith(TWO) else work, death, self.log)

    def _argv(self, subject: str, words: Sequence[str]) -> list[str]:
        given = {word.split("=")[0] for word in words}
        given |= {key for name, key in WITHOUT.items() if f"--federated.algorithm={name}" in words}
        kept = [word for word in (*COMMON, *SUBJECTS[subject].words) if word.split("=")[0] not in given]
        last = {word.split("=")[0]: word for word in kept}
        return [*last.values(), *words]

    def refusal(self, subject: str, words: Sequence[str]) -> str | None:
        """What is said of words that make no config."""
        try:
            SUBJECTS[subject].benchmark.parse(self._argv(subject, words))
        except ValueError as fault:
            if "\n" in str(fault):
                raise RuntimeError(f"several lines for {subject} {words}: {fault}") from fault
            return str(fault)
        return None

    def clear(self) -> None:
        """Remove all runs."""
        for path in self.folder.iterdir():
            if path.is_dir() and not path.name.startswith(DATA):
                shutil.rmtree(path)
            elif path.suffix == FIRST:
                path.unlink()

    def begun(
        self,
        subject: str,
        words: Sequence[str],
        name: str,
        prepare: Callable[[], None],
        data: str = DATA,
    ) -> tuple[str, str] | None:
        """A verdict on a run that did not come to its end by itself; None where it did. See `live`."""
        try:
            code = self.live(subject, words, name, None, prepare, data)
        except RuntimeError as fault:
            return "finding", f"{name}: {fault}"
        said = self.log.read_text().strip().splitlines()
        if code == 2:
            errors = [line for line in said if "error" in line.lower()]
            fine = bool(said) and "Traceback" not in "".join(said) and len(errors) <= 1
            return ("refused" if fine else "finding"), said[-1] if said else "no line"
        return None if code == 0 else ("finding", f"{name} ended with {code}: {' / '.join(said[-4:])}")

    def judge(self, subject: str, words: tuple[str, ...]) -> tuple[str, str]:
        """``(kind, what)``: refused, fine, rounding or finding."""
        self.clear()
        first = partial(_keep_first_model, self.folder / f"whole{FIRST}")
        if (verdict := self.begun(subject, words, "whole", first)) is not None:
            return verdict
        try:
            whole = outcome(self.folder / "whole")
            killed = self.live(subject, words, "killed", KILL)
            if killed is None and self.live(subject, words, "killed") != 0:
                return "finding", f"not taken up: {self.log.read_text()[-600:]}"
            compare("killed", outcome(self.folder / "killed"), whole)
            offs = {kind: self._off(subject, words, kind) for kind in (STOCK, TWO)}
        except (RuntimeError, OSError, KeyError) as fault:
            return "finding", f"{type(fault).__name__}: {str(fault)[:1500]}"
        what = ", ".join(f"{kind} {'refused' if off is None else f'{off:.1e}'}" for kind, off in offs.items())
        if max(off or 0 for off in offs.values()) <= NEAR:
            return "fine", what
        by_rounding = any(part in " ".join(words) for part in BY_ROUNDING.split())
        return ("rounding" if by_rounding else "finding"), f"apart, of the way: {what}"

    def _off(self, subject: str, words: tuple[str, ...], kind: str) -> float | None:
        """How far a run of another kind is from the whole one, the least of some seeds; None: refused."""
        other = (*words, "--runtime.engine=stock") if kind == STOCK else words
        if self.refusal(subject, other) is not None:
            return None
        least = math.inf
        for seed in ("", *OTHER_SEEDS):
            names = f"whole{seed}", f"{kind}{seed}"
            for name, argv in zip(names, (words, other)):
                if (self.folder / name).exists():
                    continue
                seeded = joined(argv, f"--seed={seed}") if seed else argv
                first = partial(_keep_first_model, self.folder / f"{name}{FIRST}")
                code = self.live(subject, seeded, name, None, first if name == names[0] else lambda: None)
                said = self.log.read_text()
                if code == 2 and name == TWO and "Traceback" not in said and said.count("error") == 1:
                    return None
                if code != 0:
                    raise RuntimeError(f"{name} ended with {code}: {said[-600:]}")
            whole, counts = (_counts(self.folder / name) for name in names)
            if counts != whole:
                raise RuntimeError(f"counts of {names[1]}: {counts} != {whole}")
            least = min(least, self._distance(*names))  # which stays where the distance is not a number
            if least <= NEAR:
                break
        return least

    def _distance(self, name: str, other_name: str) -> float:
        """How far the models of two runs are from each other, relative to the way from the first model."""
        one, other, first = (
            _vector(self.folder / path)
            for path in (f"{name}/model.safetensors", f"{other_name}/model.safetensors", f"{name}{FIRST}")
        )
        if one is None or other is None:
            return 0.0
        moved = one - first if first is not None and first.shape == one.shape else one
        way, gap = float(moved.norm()), float((one - other).norm())
        return gap / way if way else gap


def _counts(directory: Path) -> list[dict[str, int]]:
    """What a run counted in each round."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if isinstance(value, int)} for line in lines]


def _vector(path: Path) -> torch.Tensor | None:
    if not path.exists():
        return None
    tensors = load_file(path)
    parts = [tensors[name].double().reshape(-1) for name in sorted(tensors)]
    return torch.cat(parts) if parts else None


def _keep_first_model(path: Path) -> None:
    """Have this process save the model that its run begins with."""
    real = vars(execute)["train_federated"]

    def noting(run: Any, store: Any, val: Any, module: Any, *more: Any, **given: Any) -> Any:
        if not path.exists():
            state = {k: v.detach().clone().contiguous() for k, v in module.backbone.state_dict().items()}
            save_file(state, path)
        return real(run, store, val, module, *more, **given)

    vars(execute)["train_federated"] = noting


def conduct(kind: type[Campaign], description: str | None) -> None:
    """Run a campaign and say what was seen."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--draws", type=int, default=200, help="how many; with --state, in all calls together"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SUBJECTS)
    parser.add_argument("--algorithm", choices=ALGORITHMS.names())
    parser.add_argument("--state", type=Path)
    given = parser.parse_args()
    remember_calibrations()
    seen: list[list[Any]] = []
    if given.state is not None and given.state.exists():
        seen = json.loads(given.state.read_text())
    with tempfile.TemporaryDirectory() as folder, sparingly():
        campaign = kind(Path(folder))
        for number in range(given.first + len(seen), given.first + given.draws):
            subject, words = kind.draw(given.seed, number, given.only, campaign.refusal, given.algorithm)
            verdict, what = campaign.judge(subject, words)
            seen.append([verdict, number, subject, " ".join(words), what])
            if verdict in ("rounding", "finding"):
                print(f"{verdict} {number}: {subject} {' '.join(words)}\n    {what}", flush=True)
            if given.state is not None:
                write_json(given.state, seen)
    counts = Counter(verdict for verdict, *_ in seen)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS))
    if counts["finding"]:
        raise SystemExit(1)


if __name__ == "__main__":
    conduct(Campaign, __doc__)
