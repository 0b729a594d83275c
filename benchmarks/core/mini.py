"""Which file a command runs on; where there is none, the embedded mini data set, drawn once."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
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


def resolve(
    argv: Sequence[str], given: Path | None, default: Path, mini: Path, maker: str
) -> tuple[list[str], Path]:
    """The arguments and the data file of a command; the mini data set comes with its scale.

    Args:
        argv: the training arguments.
        given: ``--data_path``, if there is one.
        default: the file that is taken where none is given and this one exists.
        mini: the file of the mini data set.
        maker: the command that makes a data file.

    Raises:
        ValueError: when ``--data_path`` names a file that does not exist.
    """
    path = given or (default if default.is_file() else MINI_WORD)
    if path != MINI_WORD:
        if not path.is_file():
            raise ValueError(f"--data_path {path}: no such file; make it with {maker}")
        return list(argv), path
    has_scale = any(word == "--scale" or word.startswith("--scale=") for word in argv)
    return [*argv, *([] if has_scale else ["--scale", "mini"])], mini


def draw_mini(given: Path | None, missing: str, path: Path = MINI_FILE, spec: MiniSpec = MINI) -> None:
    """Make the file of the mini data set unless it is there, and say why it is used.

    Args:
        given: ``--data_path``, if there is one.
        missing: what is said where none is given: which file there is not, and what makes it.
        path: the file of the mini data set.
        spec: what is drawn into it.
    """
    why = missing if given is None else f"--data_path {given}"
    print(f"{why}: running on the embedded mini data set, {path}, at laptop scale", flush=True)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mini(path, spec)
