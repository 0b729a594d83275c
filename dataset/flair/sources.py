"""FLAIR from a local copy: Hugging Face's parquet, or Apple's archives or images with their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataset.fetch.archives import ArchiveSource
from dataset.fetch.parquet import ParquetSource, num_rows
from dataset.fetch.source import Shard, Source
from dataset.store.columns import ID_COLUMNS, schema
from dataset.store.index import TAXONOMIES

METADATA = "labels_and_metadata.json"
LICENCE = (
    "FLAIR: annotations CC BY-NC 4.0, each image under its Flickr owner's licence (ATTRIBUTION.txt); "
    "non-commercial, do not redistribute"
)
SCHEMA = schema(dict.fromkeys(TAXONOMIES, "label set"))
"""The columns of ``apple/flair`` beside the image; ids are strings."""
MAX_RECORD_CHARACTERS = 1 << 22
"""The longest record in Apple's JSON."""


def read_metadata(path: Path) -> pa.Table:
    """Apple's JSON list of records as a table, read object by object and held in compact columns."""
    tables: list[pa.Table] = []
    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(_json_list(path)):
        try:
            row: dict[str, Any] = {name: str(entry[name]) for name in ID_COLUMNS}
            row |= {name: [str(label) for label in entry[name]] for name in TAXONOMIES}
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}: record {number} lacks {error}; it needs {', '.join(SCHEMA.names)}"
            ) from None
        rows.append(row)
        if len(rows) == 4096:
            tables.append(pa.Table.from_pylist(rows, SCHEMA))
            rows = []
    return pa.concat_tables([*tables, pa.Table.from_pylist(rows, SCHEMA)]).combine_chunks()


def _json_list(path: Path, block: int = 1 << 20) -> Iterator[Any]:
    decoder, text, at = json.JSONDecoder(), "", 0
    with open(path, encoding="utf-8") as file:
        text = file.read(block).lstrip()
        if not text.startswith("["):
            raise ValueError(f"{path} is not a JSON list")
        at = 1
        while True:
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            if text[at : at + 1] == "]":
                return
            try:
                value, at = decoder.raw_decode(text, at)
            except RecursionError:
                raise ValueError(f"{path} is nested too deeply to be FLAIR's metadata") from None
            except json.JSONDecodeError as error:
                more = file.read(block) if len(text) - at < MAX_RECORD_CHARACTERS else ""
                if not more:
                    raise ValueError(f"{path} is not valid JSON, or is cut off ({error.msg})") from None
                text, at = text[at:] + more, 0
                continue
            yield value


def local(folder: Path) -> Source:
    """A folder that holds parquet shards somewhere below it, or Apple's JSON with archives or images."""
    if not folder.is_dir():
        raise ValueError(f"--source {folder} is neither hf, apple nor a folder")
    provenance = {
        "source": f"local folder {folder.resolve()}",
        "revision": None,
        "licence": f"the source's; {LICENCE}",
    }
    found = sorted(path for path in folder.rglob("*") if not _hidden(path.relative_to(folder)))
    parquet = [path for path in found if path.suffix == ".parquet"]
    if parquet:
        count = sum(num_rows(path) for path in parquet)
        shards = [Shard.on_disk(path, str(path.relative_to(folder))) for path in parquet]
        return ParquetSource(SCHEMA, shards, count, {**provenance, "format": "parquet"})
    listing = next((path for path in found if path.name == METADATA), None)
    if listing is None:
        raise ValueError(f"--source {folder} holds neither *.parquet nor {METADATA}")
    files = next((path for path in found if path.name == "small_images" and path.is_dir()), None)
    archives = [path for path in found if path.name.endswith((".tar.gz", ".tgz", ".tar"))]
    if files is None and not archives:
        raise ValueError(f"--source {folder} holds {METADATA} but neither small_images/ nor *.tar.gz")
    unpacked = sum(path.stat().st_size for path in files.iterdir()) if files is not None else 0
    size = max(unpacked, sum(path.stat().st_size for path in archives))
    shards = [Shard.on_disk(path, str(path.relative_to(folder))) for path in archives]
    source = ArchiveSource(
        Shard.on_disk(listing, str(listing.relative_to(folder))),
        read_metadata,
        shards,
        files,
        0,
        size,
        {**provenance, "format": "archives"},
    )
    source.num_images = len(source.listed()[1])
    return source


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
