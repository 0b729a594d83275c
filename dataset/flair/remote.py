"""FLAIR from the network: Apple's archives, or ``apple/flair`` on Hugging Face; each file in its turn."""

from __future__ import annotations

from pathlib import Path

from dataset.fetch import hugging_face as hub
from dataset.fetch.archives import ArchiveSource
from dataset.fetch.http import PATIENT, Patience, fetch, remote
from dataset.fetch.parquet import ParquetSource
from dataset.fetch.source import Shard, Source, bytes_to_download, delete_downloads
from dataset.flair.sources import LICENCE, METADATA, SCHEMA, read_metadata

REPOSITORY = "apple/flair"
REVISION = "227b0632"
"""The commit of ``apple/flair`` that is downloaded (a prefix is enough)."""
APPLE = "https://docs-assets.developer.apple.com/ml-research/datasets/flair/"
NUM_ARCHIVES, NUM_IMAGES = 43, 429_078  # of the whole of FLAIR


def apple(folder: Path, base: str = APPLE, patience: Patience = PATIENT) -> Source:
    """Apple's archives of 256-pixel images; downloaded to ``folder``, each when it is needed."""

    def shard(path: str) -> Shard:
        target, url = folder / Path(path).name, base + path
        there = remote(url, patience)

        def get() -> Path:
            fetch(url, target, there, patience)
            return target

        return Shard(target.name, there.size, get, f"{url} {there.size} {there.version}")

    metadata = shard(f"labels/{METADATA}")
    archives = [shard(f"images/small/small_images-{i:02d}.tar.gz") for i in range(NUM_ARCHIVES)]
    size = sum(one.size for one in archives)

    def discard() -> None:
        delete_downloads(folder, [one.name for one in (metadata, *archives)])

    provenance = {"source": base, "revision": None, "licence": LICENCE, "format": "archives"}
    return ArchiveSource(
        metadata,
        read_metadata,
        archives,
        None,
        NUM_IMAGES,
        size,
        provenance,
        bytes_to_download([metadata, *archives], folder),
        discard,
    )


def hugging_face(folder: Path, revision: str = REVISION, endpoint: str | None = None) -> Source:
    """``apple/flair`` at one commit; shards come to ``folder`` when needed, and their SHA-256 is checked."""
    commit, shards = hub.parquet_shards(REPOSITORY, folder, revision, endpoint)
    provenance = {
        "source": f"https://huggingface.co/datasets/{REPOSITORY}",
        "revision": commit,
        "licence": LICENCE,
        "format": "parquet",
    }
    return ParquetSource(
        SCHEMA,
        shards,
        NUM_IMAGES,
        provenance,
        bytes_to_download(shards, folder),
        lambda: hub.discard(folder, shards),
    )
