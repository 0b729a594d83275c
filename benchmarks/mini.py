"""The data set that the benchmarks run on where there is no other: the embedded mini set, drawn once."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

from dataset.flair.mini import VERSION, MiniSpec, write_mini

MINI = MiniSpec(
    train_users=600, val_users=60, test_users=120, image_size=36, num_fine_labels=68, difficulty=0.25
)
MINI_FILE = Path(f"data/flair-mini-{zlib.crc32(f'{VERSION} {MINI}'.encode()):08x}.hdf5")
CLASSES, CLASSES_FILE = replace(MINI, coarse_labels=1), MINI_FILE.with_stem(f"{MINI_FILE.stem}-classes")
"""The same with one label an image."""
MINI_WORD = Path("mini")
"""``--data_path mini`` asks for the mini data set even where there is another file."""


def draw_mini(why: str, path: Path = MINI_FILE, spec: MiniSpec = MINI) -> None:
    """Make the mini data set's file unless it is there; ``why`` it is used, for the screen."""
    print(f"{why}: running on the embedded mini data set, {path}, at laptop scale")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mini(path, spec)
