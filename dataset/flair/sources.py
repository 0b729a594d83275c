"""FLAIR from Hugging Face (parquet), from Apple (archives or images, and JSON), or from a copy of either."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataset.fetch import hugging_face as hub
from dataset.fetch.archives import ArchiveSource
from dataset.fetch.http import fetch, remote
from dataset.fetch.json_stream import elements
from dataset.fetch.parquet import ParquetSource, num_rows
from dataset.fetch.source import Shard, Source, bytes_to_download, delete_downloads
from dataset.store.columns import ID_COLUMNS, schema
from dataset.store.index import TAXONOMIES

REPOSITORY = "apple/flair"
REVISION = "227b0632"
"""The commit of ``apple/flair`` that is downloaded (a prefix is enough)."""
APPLE = "https://docs-assets.developer.apple.com/ml-research/datasets/flair/"
NUM_ARCHIVES, NUM_IMAGES = 43, 429_078  # of the whole of FLAIR
METADATA = "labels_and_metadata.json"
LICENCE = (
    "FLAIR: annotations CC BY-NC 4.0, each image under its Flickr owner's licence (ATTRIBUTION.txt); "
    "non-commercial, do not redistribute"
)
SCHEMA = schema(dict.fromkeys(TAXONOMIES, "label set"))
"""The columns of ``apple/flair`` beside the image; ids are strings."""


def read_metadata(path: Path) -> pa.Table:
    """Apple's JSON list of records as a table, read object by object and held in compact columns."""
    tables: list[pa.Table] = []
    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(elements(path, "FLAIR")):
        try:
            row: dict[str, Any] = {name: _text(entry[name], name) for name in ID_COLUMNS}
            row |= {name: _texts(entry[name], name) for name in TAXONOMIES}
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}: record {number} has no {error}; it needs {', '.join(SCHEMA.names)}"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}: record {number} has {error}") from None
        rows.append(row)
        if len(rows) == 4096:
            tables.append(pa.Table.from_pylist(rows, SCHEMA))
            rows = []
    return pa.concat_tables([*tables, pa.Table.from_pylist(rows, SCHEMA)]).combine_chunks()


def _text(value: object, name: str) -> str:
    """An id or a label as text, which in JSON may be a whole number."""
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError(f"the {name} {str(value)[:80]!r}, which is neither text nor a whole number")
    return str(value)


def _texts(value: object, name: str) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"the {name} {str(value)[:80]!r}, which is not a list")
    return [_text(item, name) for item in value]


def local(folder: Path) -> Source:
    """A folder that holds parquet shards somewhere below it, or Apple's JSON with archives or images."""
    if not folder.is_dir():
        raise ValueError(f"--source {folder} is not a folder: give hf, apple or a folder")
    provenance = {
        "source": f"local folder {folder.resolve()}",
        "revision": None,
        "licence": f"the source's; {LICENCE}",
    }
    found = sorted(path for path in folder.rglob("*") if not _hidden(path.relative_to(folder)))
    parquet = [path for path in found if path.suffix == ".parquet"]
    if parquet:
        shards = [Shard.on_disk(path, str(path.relative_to(folder))) for path in parquet]
        return ParquetSource(
            shards,
            schema=SCHEMA,
            num_images=sum(num_rows(path) for path in parquet),
            image_bytes=sum(shard.size for shard in shards),
            provenance={**provenance, "format": "parquet"},
        )
    listing = next((path for path in found if path.name == METADATA), None)
    if listing is None:
        raise ValueError(f"--source {folder} has neither *.parquet files nor {METADATA}")
    files = next((path for path in found if path.name == "small_images" and path.is_dir()), None)
    archives = [path for path in found if path.name.endswith((".tar.gz", ".tgz", ".tar"))]
    if files is None and not archives:
        raise ValueError(
            f"--source {folder} has {METADATA}, but neither a folder small_images/ nor *.tar.gz files"
        )
    unpacked = sum(path.stat().st_size for path in files.iterdir()) if files is not None else 0
    shards = [Shard.on_disk(path, str(path.relative_to(folder))) for path in archives]
    source = ArchiveSource(
        Shard.on_disk(listing, str(listing.relative_to(folder))),
        read_metadata,
        shards,
        files,
        schema=SCHEMA,
        num_images=0,
        image_bytes=max(unpacked, sum(shard.size for shard in shards)),
        provenance={**provenance, "format": "archives"},
    )
    source.num_images = len(source.listed[1])
    return source


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def apple(folder: Path, base: str = APPLE) -> Source:
    """Apple's archives of 256-pixel images; downloaded to ``folder``, each when it is needed."""

    def shard(path: str) -> Shard:
        target, url = folder / Path(path).name, base + path
        there = remote(url)
        key = f"{url} {there.size} {there.version}"
        return Shard(target.name, there.size, partial(fetch, url, target, there), key)

    metadata = shard(f"labels/{METADATA}")
    archives = [shard(f"images/small/small_images-{i:02d}.tar.gz") for i in range(NUM_ARCHIVES)]
    downloads = [metadata, *archives]
    return ArchiveSource(
        metadata,
        read_metadata,
        archives,
        None,
        schema=SCHEMA,
        num_images=NUM_IMAGES,
        image_bytes=sum(archive.size for archive in archives),
        provenance={"source": base, "revision": None, "licence": LICENCE, "format": "archives"},
        download_bytes=bytes_to_download(downloads, folder),
        discard=lambda: delete_downloads(folder, [shard.name for shard in downloads]),
    )


def hugging_face(folder: Path, revision: str) -> Source:
    """``apple/flair`` at one commit; shards come to ``folder`` when needed, and their SHA-256 is checked."""
    commit, shards = hub.parquet_shards(REPOSITORY, folder, revision)
    return ParquetSource(
        shards,
        schema=SCHEMA,
        num_images=NUM_IMAGES,
        image_bytes=sum(shard.size for shard in shards),
        provenance={
            "source": f"https://huggingface.co/datasets/{REPOSITORY}",
            "revision": commit,
            "licence": LICENCE,
            "format": "parquet",
        },
        download_bytes=bytes_to_download(shards, folder),
        discard=lambda: hub.discard(folder, shards),
    )
