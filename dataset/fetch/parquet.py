"""Images and their records in parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataset.fetch import source
from dataset.fetch.source import Image, Records, Shard, Source


@dataclass
class ParquetSource(Source):
    """Parquet shards with the columns of a schema, and a column ``image``: bytes, or a struct with bytes."""

    shards: Sequence[Shard]

    @property
    def parts(self) -> Sequence[str]:
        """The key of each shard, which is a part; see `Source.parts`."""
        return [shard.key for shard in self.shards]

    def records(self, part: int, start: int = 0) -> Iterator[Records]:
        """The records of a shard; see `Source.records`."""
        shard = self.shards[part]
        for batch in batches(shard.fetch(), [*self.schema.names, "image"], start):
            table = pa.Table.from_batches([batch.select(self.schema.names)])
            try:
                table = table.cast(self.schema)
            except pa.ArrowException as error:
                raise ValueError(f"{shard.name} has columns of wrong types: {error}") from None
            for name in self.schema.names:
                if table[name].null_count:
                    raise ValueError(f"{shard.name} has rows without a value in {name}")
                if _has_nulls(table[name]):
                    raise ValueError(f"{shard.name} has empty values in {name}")
            yield Records(table, binary(shard.name, "image", batch), shard.name)

    def images(self, part: int, start: int = 0) -> Iterator[Sequence[Image]]:
        """The images of a shard; see `Source.images`."""
        for batch in batches(self.shards[part].fetch(), ["image"], start):
            yield binary(self.shards[part].name, "image", batch)


def batches(path: Path, columns: list[str], start: int = 0) -> Iterator[Any]:
    """The record batches of a file, with these columns, from row ``start`` on."""
    # A buffer, rather than whole column chunks, bounds the memory whatever the size of a row group.
    with readable(path), pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"it has no column {missing[0]!r}; it needs {', '.join(columns)}")
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if start >= rows:
                start -= rows
                continue
            for batch in file.iter_batches(
                source.BATCH, row_groups=[group], columns=columns, use_threads=False
            ):
                if start < len(batch):
                    yield batch.slice(start)
                start = max(0, start - len(batch))


@contextmanager
def readable(path: Path, form: str = "parquet") -> Iterator[None]:
    """Turn errors of reading a file of this format into one ValueError that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        if str(path) in str(error):  # it names the file already
            raise
        raise ValueError(f"{path} cannot be read as {form}: {' '.join(str(error).split())}") from None


def _has_nulls(column: Any) -> bool:
    """Whether an element of a column is null, at any depth."""
    if column.null_count:
        return True
    if pa.types.is_struct(column.type):
        return any(_has_nulls(pc.struct_field(column, field.name)) for field in column.type)
    is_list = pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type)
    return is_list and _has_nulls(pc.list_flatten(column))


def binary(origin: str, name: str, batch: Any) -> list[Image]:
    """The images' bytes in a column of a record batch: bytes, or a struct that holds them.

    Raises:
        ValueError: that names the origin, for a column of another type.
    """
    column = batch.column(name)
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.flatten()[column.type.get_field_index("bytes")]
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise ValueError(
            f"{origin}: the column {name!r} has the type {column.type}, but must have the bytes of images"
        )
    return [memoryview(value.as_buffer()).cast("B") if value.is_valid else None for value in column]


def num_rows(path: Path) -> int:
    """The number of records in a file; ValueError if it is no parquet."""
    with readable(path):
        return int(pq.read_metadata(path).num_rows)
