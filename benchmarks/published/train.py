"""Make one run of a published row, or go on with it, and keep its result in the repository.

    python -m benchmarks.published.train --row niid-fedavg-dirichlet-fn --seed 0 [--data_path F]

It is `benchmarks.visual_classification.train` with the row's YAML, into ``runs/published/ROW-seedN``. When it
has ended, ``benchmarks/published/results/ROW-seedN.json`` holds the accuracy after every round, the clients'
sizes, the command, the commit and the hardware; of a run whose model diverged, the rounds until then. A
signal ends it after its round with exit code 75; the same command goes on. Of the config's keys only
``--runtime.*`` can be given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.core.code_version import commit
from benchmarks.core.config.digests import tree_digest
from benchmarks.core.config.trees import Tree, read_yaml
from benchmarks.core.facts import hardware
from benchmarks.published.rows import RESULTS, Row, names, read_row
from benchmarks.visual_classification import train as vision
from benchmarks.visual_classification.config import VISION
from dataset.cli import run as run_command
from dataset.files import write_json
from dataset.store.hdf5 import DataFile
from pfl_ext.checkpoint import read_json
from pfl_ext.tasks.ranking import Diverged
from pfl_ext.workers.distributed import is_main

RUNS = Path("runs") / "published"
OF_RESULTS = {
    "arithmetic": "arithmetic",
    "seconds": "wall_clock_s",
    "data_sha256": "data_sha256",
    "config_sha256": "config_sha256",
    "partition": "partition",
    "rounds": "rounds",
}
"""What is kept of ``results.json``, and its name there."""


def run_name(row: Row, seed: int) -> str:
    """Name of a run's directory, and of the file with its result."""
    return f"{row.name}-seed{seed}"


def result_of(row: Row, seed: int, directory: Path, words: Sequence[str]) -> Tree:
    """What is kept of a run that has ended, or that ended where its model diverged.

    Args:
        row: that was run.
        seed: of the run.
        directory: of the run.
        words: of the command that made it.
    """
    lines = [
        json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    curve = {int(line["round"]): float(line["tracked"]["accuracy"]) for line in lines if "tracked" in line}
    rounds = sorted(number for number in curve if number) or [0]
    best = max(rounds, key=lambda number: (curve[number], -number))
    ended = directory / "results.json"
    results = read_json(ended) if ended.exists() else {}
    return {
        "row": row.name,
        "seed": seed,
        "command": f"python -m benchmarks.published.train {' '.join(words)}",
        **({} if results else _of_a_diverged_run(directory, int(lines[-1]["round"]))),
        "commit": results.get("commit") or commit(),
        "hardware": results.get("hardware") or hardware(),
        **{key: results[name] for key, name in OF_RESULTS.items() if name in results},
        "best_round": best,
        "best": curve[best],
        "last": curve[rounds[-1]],
        "last_10": fmean(curve[number] for number in rounds[-10:]),
        **_of_own_models(results),
        "curve": [curve[number] for number in rounds],
    }


def _of_own_models(results: Tree) -> Tree:
    """The accuracy of users' own models on the images that they set aside, if the run has it."""
    seen = results.get("clients", {}).get("seen", {})
    return {"own": seen["personal"]["pooled"]["accuracy"]} if "personal" in seen else {}


def _of_a_diverged_run(directory: Path, number: int) -> Tree:
    return {
        "diverged_in_round": number,
        "data_sha256": read_json(directory / "checkpoint" / "data.json")["sha256"],
        "config_sha256": tree_digest(read_yaml(directory / "config.yaml")),
    }


def main(argv: Sequence[str]) -> None:
    """Train, and keep the result.

    Raises:
        ValueError: for an unknown row, a key that would make it another, and a missing data file.
    """
    if {"--help", "-h"} & set(argv):
        print(f"{__doc__}\nThe rows: {', '.join(names())}.")
        return
    row, seed, rest = _asked(argv)
    directory = RUNS / run_name(row, seed)
    command = [*row.words(seed), "--run_dir", str(directory), *rest]
    run = VISION.parse(command)
    source = vision.VisualClassification.source(run.config)
    path = run.data_path or source.path
    if path is None or not path.is_file():
        absent = source.missing if run.data_path is None else f"--data_path {path}: no such file"
        raise ValueError(f"{absent}: a published row always needs its own data; give --data_path FILE")
    check_maker(path, run.config.data.dataset)
    try:
        vision.main(command)
    except Diverged:
        _keep(row, seed, directory, argv)
        raise
    _keep(row, seed, directory, argv)


def _keep(row: Row, seed: int, directory: Path, words: Sequence[str]) -> None:
    if is_main():
        kept = RESULTS / f"{run_name(row, seed)}.json"
        write_json(kept, result_of(row, seed, directory, words))
        print(f"kept {kept}")


def check_maker(path: Path, dataset: str) -> None:
    """Raise ValueError if a file was made of another data set than the row's."""
    with DataFile(path) as file:
        maker = file.provenance.get("tool")
    wanted = f"dataset.{dataset}.download_preprocess"
    if maker != wanted:
        raise ValueError(f"{path} was made by {maker}, but this row needs a file made by python -m {wanted}")


def _asked(argv: Sequence[str]) -> tuple[Row, int, list[str]]:
    """The row, the seed and the words for training among a command's words."""
    read = {"row": "", "seed": "0"}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and key in read:
            read[key] = value if equals else next(words, "")
        elif word.startswith(("--runtime.", "--data_path")):
            rest += [word] if equals else [word, next(words, "")]
        else:
            raise ValueError(
                f"{word} would change the row: only --row, --seed, --data_path and --runtime.* can be given"
            )
    if not read["row"]:
        raise ValueError(f"give --row, one of {', '.join(names())}")
    if not (read["seed"].isascii() and read["seed"].isdigit()):
        raise ValueError(f"--seed is {read['seed']!r}: give a whole number from 0 on")
    return read_row(read["row"]), int(read["seed"]), rest


if __name__ == "__main__":
    sys.exit(run_command(main))
