"""How start, rounds, evaluation and memory grow with the number of users, and of validation images.

    python -m benchmarks.bench.growth [--times 1,10,100] [--val 10,100] [--folder D] [--output F]

Users are FLAIR's histogram of 41,131 (the mini set's index), so many times over with ids of their own; images
are blank, of 8 pixels. Each row is two runs of the training command, in processes of their own: LeNet,
cohorts of 20, 1 and then 6 rounds. ``--val`` multiplies the 858 images of val, scored with 17 and 1,628
labels. Start is a run of one round, from the call to its end; a round is the median of those after the first;
memory is the most that the process had resident. Files are kept in ``--folder`` and used again.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.core.code_version import commit
from benchmarks.core.facts import hardware
from benchmarks.reporting.runs import RunRecord
from benchmarks.reporting.tables import print_row
from dataset.arrays import IntArray
from dataset.cli import OneLineParser, output_file
from dataset.cli import run as run_command
from dataset.files import write_json
from dataset.flair.mini import MiniSpec, mini_index
from dataset.store.annotations import LabelMatrix, offsets_of
from dataset.store.hdf5 import DataFile
from dataset.store.index import DatasetIndex, IdColumn, SplitIndex
from dataset.store.writer import DataWriter

SIDE, ROUNDS = 8, 6
SAMPLED_EVERY = 0.1  # seconds
SPEC = MiniSpec(val_users=120, test_users=120, image_size=SIDE)
HEADS = ("users", "images", "val images", "labels", "file, GB", "start, s", "round, s", "memory, GB")
"""Column titles of the table."""
WORDS = (
    "--model.arch=lenet",
    "--data.image_size=20",
    "--model.input_size=18",
    "--federated.cohort_size=20",
    "--evaluation.best_by=last",
    "--runtime.progress=false",
    "--runtime.threads=1",
)


@dataclass(frozen=True)
class Row:
    """One size: how often the users of train and of val are there, and what is scored."""

    train: int = 1
    val: int = 1
    fine: bool = False


@dataclass(frozen=True)
class Measured:
    """What one process took."""

    seconds: float
    memory_gb: float
    rounds_s: Sequence[float]


def repeated(split: SplitIndex, times: int) -> SplitIndex:
    """The users of a split so many times over, each time with other ids."""

    def ids(column: Sequence[str]) -> IdColumn:
        raw = IdColumn.of(column).raw
        return IdColumn(np.concatenate([np.char.add(f"{n:03d}-".encode(), raw) for n in range(times)]))

    def labels(matrix: LabelMatrix) -> LabelMatrix:
        indptr = offsets_of(np.tile(np.diff(matrix.indptr), times))
        return LabelMatrix(indptr, np.tile(matrix.indices, times), matrix.num_labels)

    sizes = np.tile(np.diff(split.user_offsets), times)
    return replace(
        split,
        user_ids=ids(split.user_ids),
        user_offsets=offsets_of(sizes),
        user_index=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
        image_ids=ids(split.image_ids),
        annotations={name: labels(matrix) for name, matrix in split.labels.items()},
    )


def grown(row: Row, spec: MiniSpec = SPEC) -> DatasetIndex:
    """The index of a row."""
    index = mini_index(spec)
    splits = dict(index.splits)
    for name, times in (("train", row.train), ("val", row.val)):
        splits[name] = repeated(splits[name], times)
    return replace(index, splits=splits)


def write(path: Path, index: DatasetIndex) -> None:
    """The file, with blank images."""
    with DataWriter(path, index, storage="raw", image_size=SIDE) as writer:
        for name, split in index.splits.items():
            for rows in _batches(split.num_images):
                writer.write(name, rows, np.full((len(rows), SIDE, SIDE, 3), 127, np.uint8))


def _batches(images: int, at_once: int = 1 << 17) -> Iterator[IntArray]:
    for start in range(0, images, at_once):
        yield np.arange(start, min(start + at_once, images))


def train(path: Path, row: Row, rounds: int) -> Measured:
    """A run of the training command.

    Raises:
        ValueError: with its last line, when it fails.
    """
    setting = "fl-r-1628" if row.fine else "fl-r-17"
    with tempfile.TemporaryDirectory() as folder:
        run, said = Path(folder) / "run", Path(folder) / "said"
        words = [*WORDS, f"--federated.num_rounds={rounds}", f"--evaluation.every_rounds={rounds}"]
        given = ["--config", setting, "--data_path", str(path), "--run_dir", str(run), *words]
        command = [sys.executable, "-m", "benchmarks.flair.train", *given]
        begun, most = time.monotonic(), 0.0
        with said.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            while process.poll() is None:
                most = max(most, _most_resident(process.pid))
                time.sleep(SAMPLED_EVERY)
        seconds = time.monotonic() - begun
        if process.returncode:
            raise ValueError(
                f"{' '.join(command[1:])} failed: {said.read_text(encoding='utf-8').splitlines()[-1:]}"
            )
        lines = RunRecord(run).history
    return Measured(seconds, most, [line["seconds"] for line in lines if "train_loss" in line])


def _most_resident(process: int) -> float:
    """GB; what the parent had before the process began its own program is not among it, as for getrusage."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def measured(row: Row, folder: Path) -> dict[str, float]:
    """A row of the table, as `HEADS`; the file is made where it is not there yet."""
    path = folder / f"growth-{row.train}-{row.val}.hdf5"
    if not path.exists():
        print(f"writing {path}", file=sys.stderr, flush=True)
        write(path, grown(row))
    one, more = (train(path, row, rounds) for rounds in (1, ROUNDS))
    data = DataFile(path)
    values = (
        data.split("train").num_users,
        data.split("train").num_images,
        data.split("val").num_images,
        1628 if row.fine else 17,
        path.stat().st_size / 1e9,
        one.seconds,
        statistics.median(more.rounds_s[1:]),
        max(one.memory_gb, more.memory_gb),
    )
    return dict(zip(HEADS, values))


def main(argv: Sequence[str]) -> None:
    """Measure, print a table and write JSON."""
    parser = OneLineParser(prog="python -m benchmarks.bench.growth", description=__doc__, allow_abbrev=False)
    parser.add_argument("--times", default="1,10,100", help="how often FLAIR's users are there")
    parser.add_argument("--val", default="10,100", help="how often the users of val are there")
    parser.add_argument("--folder", type=Path, default=Path("bench/growth"))
    parser.add_argument("--output", "--output_file", type=Path, default=Path("bench/growth.json"))
    args = parser.parse_args(argv)
    rows = [Row(train=times) for times in _numbers("--times", args.times)]
    rows += [Row(val=times, fine=fine) for times in _numbers("--val", args.val) for fine in (False, True)]
    output_file("--output", args.output)
    args.folder.mkdir(parents=True, exist_ok=True)
    print(f"{hardware()}; commit {commit()}\n")
    print_row(*HEADS)
    print_row(*["---"] * len(HEADS))
    found = []
    for row in rows:
        found.append(measured(row, args.folder))
        print_row(
            *(f"{value:,}" if isinstance(value, int) else f"{value:.3g}" for value in found[-1].values())
        )
        write_json(args.output, {"hardware": hardware(), "commit": commit(), "rows": found})


def _numbers(option: str, text: str) -> list[int]:
    numbers = [int(word) if word.isdigit() else 0 for word in text.split(",") if word]
    if any(not 1 <= number <= 100 for number in numbers):
        raise ValueError(f"{option} is {text!r}: give whole numbers from 1 to 100, as 1,10")
    return numbers


if __name__ == "__main__":
    sys.exit(run_command(main))
