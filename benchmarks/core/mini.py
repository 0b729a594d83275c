"""Which file a command runs on; where there is none, the embedded mini data set, drawn once."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dataset.files import locked
from dataset.flair.mini import VERSION, MiniSpec, write_mini
from pfl_ext.workers.distributed import barrier, is_main

MINI = MiniSpec(
    train_users=600, val_users=60, test_users=120, image_size=36, num_fine_labels=68, difficulty=0.25
)
MINI_WORD = Path("mini")
"""``--data_path mini`` asks for the mini data set even where there is another file."""


def mini_file(spec: MiniSpec, word: str = "") -> Path:
    """The path of a mini data set; ``-word`` says what it holds besides labels."""
    return Path(f"data/flair-mini{word}-{zlib.crc32(f'{VERSION} {spec}'.encode()):08x}.hdf5")


MINI_FILE = mini_file(MINI)
CLASSES_FILE = MINI_FILE.with_stem(f"{MINI_FILE.stem}-classes")


@dataclass(frozen=True)
class Mini:
    """A mini data set, and its file."""

    spec: MiniSpec
    path: Path
    write: Callable[[Path, MiniSpec], None] | None = None
    """Draws it; None: with labels alone."""


CLASSES = Mini(replace(MINI, coarse_labels=1), CLASSES_FILE)
"""The mini data set with one label an image."""


@dataclass(frozen=True)
class DataSource:
    """The data file of a benchmark, and the mini data set that takes its place."""

    path: Path | None = None
    """The file that is taken where none is named and this one exists."""
    maker: str = "a download_preprocess of dataset"
    """The command that makes a data file."""
    missing: str = "no --data_path"
    """What is said where there is no file: which one, and what makes it."""
    mini: Mini = Mini(MINI, MINI_FILE)

    def resolve(
        self,
        argv: Sequence[str],
        asked: Path | None,
        scales: Collection[str] = ("mini",),
        setting: str = "",
    ) -> tuple[list[str], Path]:
        """The arguments and the data file of a command; the mini data set comes with its scale.

        Args:
            argv: the training arguments.
            asked: ``--data_path``, if there is one.
            scales: those that the benchmark has.
            setting: of the run; ``mini-SETTING`` comes before the scale ``mini`` where there is one.

        Raises:
            ValueError: when ``--data_path`` names a file that does not exist.
        """
        path = asked or (self.path if self.path and self.path.is_file() else MINI_WORD)
        if path != MINI_WORD:
            if path.is_dir():
                raise ValueError(f"--data_path {path} is a folder; give the HDF5 file")
            if not path.is_file():
                raise ValueError(
                    f"--data_path {path}: no such file; make one with {self.maker}, or from "
                    "your own images with python -m dataset.convert"
                )
            return list(argv), path
        has_scale = any(word == "--scale" or word.startswith("--scale=") for word in argv)
        scale = next((name for name in (f"mini-{setting}", "mini") if name in scales), None)
        laid_over = [] if has_scale or scale is None else ["--scale", scale]
        return [*argv, *laid_over], self.mini.path

    def ready(self, asked: Path | None, path: Path) -> None:
        """Draw the mini data set where `resolve` chose it, and say why it is used."""
        if path != self.mini.path or path == asked:
            return
        if is_main():
            why = self.missing if asked is None else f"--data_path {asked}"
            print(f"{why}: using the mini data set of synthetic images, {path}", flush=True)
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                waiting = f"waiting for another process that draws {path}"
                with locked(path.with_name(f".{path.name}.lock"), waiting, wait=math.inf):
                    if not path.is_file():
                        (self.mini.write or write_mini)(path, self.mini.spec)
        barrier()
