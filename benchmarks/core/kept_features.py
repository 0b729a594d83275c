"""The features of a run's images on disk: computed where they are missing, by one process.

Shape letters: n rows, D features of an image.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.core.config.benchmark import Run
from benchmarks.core.own_code import code_of
from dataset.arrays import Float32Array, IntArray
from dataset.files import locked, prefetched, written
from dataset.store.features import FeatureCache
from dataset.store.hdf5 import DataFile
from dataset.store.views import SplitImages
from pfl_ext.data.augmented_views import AugmentedViews, crops_of_view
from pfl_ext.models.features import Split
from pfl_ext.workers.distributed import barrier, is_main

BATCH = 32  # images of one pass


@dataclasses.dataclass(frozen=True)
class FeatureViews:
    """Features of each image's views, read where one of them is drawn."""

    features: FeatureCache
    num_views: int

    def read(self, split: str, rows: IntArray) -> Any:
        """The views of rows of a split of the file."""
        return AugmentedViews(np.asarray(rows, np.int64), self.num_views, partial(self._drawn, split))

    def _drawn(self, split: str, rows: IntArray, views: IntArray) -> Float32Array:
        """``[n, D]`` of rows and a view of each."""
        out = np.empty((len(rows), self.features.width), np.float32)
        for view in np.unique(views).tolist():
            here = views == view
            out[here] = self.features.read(_name_of_view(split, view), rows[here])
        return out


def _name_of_view(split: str, view: int) -> str:
    return f"{split}-view-{view}"


@dataclasses.dataclass(frozen=True)
class _Column:
    """What the features of some rows are computed from."""

    split: str
    """Name of the split in the file."""
    rows: IntArray
    """The rows of the split that are read."""
    pixels: Any
    crops: Callable[[IntArray], Float32Array] | None = None
    """The crops of given rows; None: whole images, as evaluation sees them."""


@dataclasses.dataclass(frozen=True)
class KeptFeatures:
    """The frozen layers of a run, and the file whose images they are given."""

    run: Run[Any]
    split: Split
    data: Path
    file: DataFile

    def whole_images(self, stores: list[SplitImages]) -> FeatureCache:
        """The features of all rows of these stores, as evaluation sees them."""
        columns: dict[str, _Column] = {}
        for store in stores:
            name, rows = store.file_split, store.file_rows
            if name in columns:
                rows = np.concatenate([columns[name].rows, rows])
            columns[name] = _Column(name, rows, store.pixels)
        return self._filled(columns, {})

    def views(self, train: SplitImages, num_views: int) -> FeatureViews:
        """The features of as many views of each training image.

        How many there are is no part of what they depend on: a run with more of them computes only those.
        """
        config, split = self.run.config, train.file_split

        def crops(view: int) -> Callable[[IntArray], Float32Array]:
            sizes = config.data.image_size, config.model.input_size
            return lambda rows: crops_of_view(config.seed, split, rows, view, *sizes, config.augment)

        columns = {
            _name_of_view(split, view): _Column(split, train.file_rows, train.pixels, crops(view))
            for view in range(num_views)
        }
        drawn = {"seed": config.seed, "crop": config.augment.crop, "flip": config.augment.flip}
        return FeatureViews(self._filled(columns, {"views": drawn}), num_views)

    def _filled(self, columns: Mapping[str, _Column], besides: Mapping[str, object]) -> FeatureCache:
        """The features of these columns; ``besides``: what they depend on, that others do not."""
        config = self.run.config
        code = code_of(config.model.arch, self.split.whole.backbone)
        depends_on = {
            "data_sha256": self.file.content_sha256(),
            "image_size": config.data.image_size,
            "network_sha256": self.split.digest(),
            "network": config.model.arch,
            **({"code": code} if code else {}),
            **besides,
        }
        counts = {name: self.file.split(column.split).num_images for name, column in columns.items()}
        kind = config.model.feature_format
        cache = FeatureCache(self.data, depends_on, counts, self.split.width, kind)
        if is_main() and cache.missing({name: column.rows for name, column in columns.items()}):
            self._fill(cache, columns)
        barrier()
        return cache

    def _fill(self, cache: FeatureCache, columns: Mapping[str, _Column]) -> None:
        """Compute what is missing, while no other process does."""
        try:
            with written(cache.folder):
                cache.folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            remedy = "copy the data file to a folder of your own, or set runtime.cache_features to false"
            raise OSError(f"{fault}: {remedy}") from fault
        waiting = "waiting for another process that computes these features"
        with locked(cache.folder / "lock", waiting, wait=math.inf):
            # another process may have computed some
            blocks = cache.missing({name: column.rows for name, column in columns.items()})
            bar = tqdm(
                total=sum(cache.block_size(*block) for block in blocks),
                unit="image",
                desc=f"features, once, {cache.num_bytes / 1e9:.2g} GB",
                file=sys.stderr,
                mininterval=0.5 if sys.stderr.isatty() else 10,
            )
            threads = self.run.runtime.reader_threads

            def compute(name: str, rows: IntArray) -> Float32Array:
                column = columns[name]
                batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]

                def read(batch: IntArray) -> tuple[Any, Float32Array | None]:
                    crops = None if column.crops is None else column.crops(batch)
                    return column.pixels.read(column.split, batch), crops

                parts = []
                for images, crops in prefetched(read, batches, ahead=4, threads=threads):
                    there = None if crops is None else torch.from_numpy(crops)
                    parts.append(self.split.features(torch.from_numpy(images), there))
                    bar.update(len(images))
                return np.concatenate(parts)

            with bar:
                cache.fill(blocks, compute)
