"""Kill -9 at random moments of preprocessing, go on each time until the file is there, and compare content.

    python -m tests.campaigns.kill_preprocessing --kills 20 --images 3000

Half of the kills come at a random time, half at a random place: at an entry of the journal, a write, a flush,
while the file is laid out, completed, validated or renamed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from dataset.cli import run
from dataset.fetch import source
from dataset.flair.sources import local
from dataset.preprocess import Options, preprocess
from dataset.store.native import Storage
from tests.campaigns.lives import After, At, live
from tests.dataset.drawn import content_hash, records, write_archives, write_files, write_parquet

KINDS: dict[str, tuple[str, Storage]] = {
    "parquet": ("parquet", "jpeg"),
    "archives": ("archives", "jpeg"),
    "files": ("files", "jpeg"),
    "pixels": ("parquet", "raw"),
}
PLACES = (
    "dataset.journal:Journal.put",
    "dataset.journal:Journal.discard",
    "dataset.store.writer:DataWriter.write",
    "dataset.store.writer:DataWriter.put_down",
    "dataset.store.writer:DataWriter._create",
    "dataset.store.writer:DataWriter._complete",
    "dataset.store.writer:DataWriter._take_up",
    "dataset.store.writer:validate",
    "dataset.store.writer:sync",
    "dataset.preprocess:build_index",
    "dataset.preprocess:decode",
    "os:fdatasync",
)


class Campaign:
    """Kills of the preprocessing of one kind of source, in one folder."""

    def __init__(self, kind: str, images: int, folder: Path, seed: int) -> None:
        layout, self._storage = KINDS[kind]
        self._source, self._folder = folder / f"source-{kind}", folder / kind
        self._log = folder / "log.txt"
        write = {"parquet": write_parquet, "archives": write_archives, "files": write_files}[layout]
        write(self._source, records(images))
        self._folder.mkdir()
        self._blocks = max(images // 20, 1)
        self._rng = np.random.default_rng([seed, *kind.encode()])
        started = time.monotonic()
        assert self._live("whole", None) == 0, self._log.read_text()
        self._seconds = time.monotonic() - started
        self._whole = content_hash(self._folder / "whole")

    def _live(self, name: str, death: After | At | None) -> int | None:
        def work() -> int:
            source.BATCH = 16
            options = Options(
                self._folder / name, self._storage, image_size=32, block_images=self._blocks, workers=2
            )
            return run(lambda _: preprocess(local(self._source), options), [])

        return live(work, death, self._log)

    def kill(self, kills: int) -> tuple[int, Counter[str]]:
        """Kill so often; how many files were made, and where the deaths were.

        :raises RuntimeError: when a file is not made, holds other content, or something is left beside it.
        """
        files, deaths = 0, Counter[str]()
        while deaths.total() < kills:
            name, code = f"file{files}", None
            while code is None:
                death: After | At | None = None
                if deaths.total() < kills and self._rng.random() < 0.5:
                    death = After(float(self._rng.uniform(0, 0.8 * self._seconds)))
                elif deaths.total() < kills:
                    place = str(self._rng.choice(PLACES))
                    death = At(place, int(self._rng.integers(1, 12)), bool(self._rng.random() < 0.5))
                finished = (self._folder / name).exists()
                code = 0 if finished else self._live(name, death)
                if code is None:
                    deaths[str(death)] += 1
            if code != 0 or content_hash(self._folder / name) != self._whole:
                raise RuntimeError(f"{name} ended with {code}: {self._log.read_text()[-2000:]}")
            files += 1
        left = {path.name for path in self._folder.iterdir() if not path.name.startswith("file")} - {"whole"}
        if left:
            raise RuntimeError(f"left behind: {left}")
        return files, deaths


def main() -> None:
    """Run the campaign and say what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--kind", choices=("all", *KINDS), default="all")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind in list(KINDS) if given.kind == "all" else [given.kind]:
            started = time.monotonic()
            files, deaths = Campaign(kind, given.images, Path(folder), given.seed).kill(given.kills)
            print(
                f"{kind}: {deaths.total()} kills over {files} files of {given.images} images, each with the "
                f"content of the file made in one go ({time.monotonic() - started:.0f} s)"
            )
            for place, count in deaths.most_common():
                print(f"  {count:4d} {place}", flush=True)


if __name__ == "__main__":
    main()
