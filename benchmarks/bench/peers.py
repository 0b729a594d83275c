"""How fast a round is beside other software: the fast engine, stock pfl, a plain loop of torch, and Flower.

    python -m benchmarks.bench.peers [--output F] [--rounds 3] [--turns 2] [--only CASE] [--flower PYTHON]

All train the same images of the same number of users, with the same network and the same local steps, in
float32 on two cores. Each side is a process of its own, and they take turns; the first round of each process
is not counted. Memory is the largest sum over a side's processes of what each has for itself and its share
of what several have (PSS). Flower's simulation has two actors of one CPU each and an environment of its own,
``.venv-peers``, which ``make bench-peers`` makes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmarks.bench.peer_work import Users, Work, plain_rounds, write
from benchmarks.bench.rounds import Side, Sides
from benchmarks.core.code_version import commit
from benchmarks.core.config.trees import Tree
from benchmarks.core.facts import hardware
from benchmarks.flair import bench as flair
from benchmarks.reporting.tables import print_row
from benchmarks.visual_classification import bench as vision
from dataset.cli import OneLineParser, output_file
from dataset.cli import run as run_command
from dataset.files import write_json

OURS = ("fast", "stock")
SIDES = (*OURS, "plain loop", "Flower")
FLOWER = Path(".venv-peers/bin/python")
SAMPLED_EVERY = 0.25  # seconds


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    sides: Callable[[Path], AbstractContextManager[Sides]]
    """The two engines; from a folder for files."""
    network: str
    labels: int
    is_multi_label: bool
    pixels: int


def _of_flair(pixels: int, cohort: int, users: int) -> Case:
    case = flair.Case(f"FLAIR, {pixels} px", pixels, cohort=cohort, users=users)
    return Case(case.name, lambda folder: flair.compared(case, folder), "resnet18", 17, True, pixels)


def _of_vision(name: str) -> Case:
    (case,) = (one for one in vision.CPU if one.name == name)
    return Case(name, lambda _: nullcontext(vision.compared(case)), "lenet", 10, False, 32)


CASES = (_of_vision("NIID-Bench, FedAvg"), _of_flair(32, 20, 200), _of_flair(224, 10, 100))


def prepare(case: Case, folder: Path) -> None:
    """The users' images and the work, for the sides that are not ours."""
    with case.sides(folder) as sides:
        config, store = sides.fast.config, sides.opened(sides.fast).split("train")
        images, targets = store.read(np.arange(store.user_offsets[-1]))
        offsets = torch.from_numpy(np.asarray(store.user_offsets, np.int64))
    margin = (images.shape[1] - case.pixels) // 2
    middle = images[:, margin : margin + case.pixels, margin : margin + case.pixels]
    local = config.local
    work = Work(
        case.network,
        case.labels,
        case.is_multi_label,
        config.federated.cohort_size,
        local.num_epochs,
        local.batch_size,
        config.local_learning_rate,
        local.momentum,
        local.weight_decay,
    )
    planes = torch.from_numpy(np.ascontiguousarray(middle)).permute(0, 3, 1, 2).contiguous()
    write(folder, work, planes, torch.from_numpy(np.asarray(targets, np.float32)), offsets)


def seconds_of(side: str, case: Case, folder: Path, rounds: int) -> list[float]:
    """Seconds of so many rounds by one of our own sides or the plain loop, in this process."""
    if side not in OURS:
        return plain_rounds(Users(folder), rounds + 1)[1:]
    with case.sides(folder) as sides:
        measured = Side(sides, sides.fast if side == "fast" else sides.stock)
        for number in range(rounds + 1):
            measured.round(number)
        measured.close()
    return measured.times


def _memory(root: psutil.Process) -> int:
    """Bytes of a process and all that it started."""
    total = 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def run_side(command: Sequence[str]) -> tuple[list[float], float]:
    """The seconds that a side prints on its last line, and the most memory it had, in GB.

    Raises:
        ValueError: with its last line, when it fails.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        most, root, ended = 0, psutil.Process(process.pid), threading.Event()

        def watch() -> None:
            nonlocal most
            while not ended.wait(SAMPLED_EVERY):
                with suppress(psutil.Error):
                    most = max(most, _memory(root))

        watching = threading.Thread(target=watch)
        watching.start()
        output, _ = process.communicate()
        ended.set()
        watching.join()
        errors.seek(0)
        if process.returncode:
            said = errors.read().splitlines() or ["it said nothing"]
            raise ValueError(f"{' '.join(command[:3])} ended with {process.returncode}: {said[-1]}")
    return json.loads(output.splitlines()[-1]), most / 1e9


def command_of(side: str, case: Case, folder: Path, rounds: int, flower: Path) -> list[str]:
    """What measures a side in a process of its own."""
    if side == "Flower":
        return [str(flower), "-m", "benchmarks.bench.flower_peer", str(folder), str(rounds + 1)]
    own = [sys.executable, "-m", "benchmarks.bench.peers", "--only", case.name, "--rounds", str(rounds)]
    return [*own, "--side", side, "--folder", str(folder)]


def measured(case: Case, folder: Path, rounds: int, turns: int, flower: Path | None) -> Tree:
    """Each side's seconds of each counted round, and its memory."""
    prepare(case, folder)
    out: dict[str, Tree] = {}
    for _ in range(turns):
        for side in SIDES if flower is not None else SIDES[:-1]:
            print(f"{case.name}: {side}", file=sys.stderr, flush=True)
            command = command_of(side, case, folder, rounds, flower or Path())
            seconds, memory = run_side(command)
            found = out.setdefault(side, {"rounds_s": [], "peak_memory_gb": 0.0})
            found["rounds_s"] += seconds[-rounds:]
            found["peak_memory_gb"] = max(found["peak_memory_gb"], memory)
    return out


def show(case: str, found: Mapping[str, Tree]) -> None:
    """A row of the table for each side."""
    least = float(np.median(found["fast"]["rounds_s"]))
    for side, result in found.items():
        seconds = result["rounds_s"]
        middle = float(np.median(seconds))
        spread = f"{middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        print_row(case, side, spread, f"{middle / least:.1f}", f"{result['peak_memory_gb']:.1f}")


def main(argv: Sequence[str]) -> None:
    """Measure, print a table and write JSON; with ``--side``, one side in this process."""
    parser = OneLineParser(prog="python -m benchmarks.bench.peers", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", "--output_file", type=Path, default=Path("bench/peers.json"))
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of a process")
    parser.add_argument("--turns", type=int, default=2, help="processes of each side")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--flower", type=Path, default=FLOWER, help="a Python that has flwr and Ray")
    parser.add_argument("--side", choices=SIDES[:-1], help="measure this side alone, here")
    parser.add_argument("--folder", type=Path, help="with --side: where the images are")
    args = parser.parse_args(argv)
    for name in ("rounds", "turns"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}: give at least 1")
    cases = [case for case in CASES if args.only in case.name]
    if not cases:
        raise ValueError(f"--only {args.only!r} is in no case's name: {', '.join(c.name for c in CASES)}")
    if args.side is not None:
        if args.folder is None:
            raise ValueError("--side needs --folder")
        print(json.dumps(seconds_of(args.side, cases[0], args.folder, args.rounds)))
        return
    flower = args.flower if args.flower.is_file() else None
    if flower is None:
        print(f"{args.flower} is not there, so Flower is left out: make bench-peers installs it")
    output_file("--output", args.output)
    results: Tree = {}
    print(f"{hardware()}; torch {torch.__version__}; commit {commit()}\n")
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            results[case.name] = measured(case, Path(folder), args.rounds, args.turns, flower)
        write_json(args.output, {"hardware": hardware(), "commit": commit(), "results": results})
    print_row("case", "side", "a round, s (least to most)", "times ours", "memory, GB")
    print_row(*["---"] * 5)
    for name, found in results.items():
        show(name, found)


if __name__ == "__main__":
    sys.exit(run_command(main))
