"""Reads one matrix of bytes from a MATLAB file of level 5, safely for any content.

SciPy's reader crashes (a segmentation fault) on damaged files, and allocates the sizes that they declare.
This one reads a field of a struct, checks every length against the available bytes, and raises a ValueError.
The format is The MathWorks' "MAT-File Format", chapter 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Literal

import numpy as np

from dataset.arrays import ByteArray

MAX_BYTES = 1 << 26
"""Most bytes of a file's matrices after decompression."""
HEADER = 128
_MATRIX, _COMPRESSED, _UINT8 = 14, 15, 2  # types of data elements
_STRUCT_CLASS, _UINT8_CLASS = 2, 9  # classes of arrays
Order = Literal["little", "big"]


def byte_matrix(content: bytes, variable: str, field: str) -> ByteArray:
    """The matrix of bytes, ``[H, W]``, in a field of a struct.

    Raises:
        ValueError: with a clause, when there is none.
    """
    orders: dict[bytes, Order] = {b"IM": "little", b"MI": "big"}
    order = orders.get(content[HEADER - 2 : HEADER])
    if order is None:
        raise ValueError("it is not a MATLAB file of level 5")
    left = MAX_BYTES
    for kind, data in _elements(content[HEADER:], order):
        if kind == _COMPRESSED:
            data = _decompressed(data, left)
            left -= len(data)
            kind, data = next(_elements(data, order), (0, b""))
        if kind == _MATRIX and (found := _Array(data, order)).name == variable.encode():
            return found.field(field.encode()).bytes()
    raise ValueError(f"it has no variable {variable}")


class _Array:
    """An array's class, shape and name, and its parts."""

    def __init__(self, data: bytes, order: Order) -> None:
        self._order, self._parts = order, _elements(data, order)
        (flags, shape, name) = (next(self._parts, (0, b""))[1] for _ in range(3))
        self.kind = int.from_bytes(flags[:4], order) & 0xFF
        self.shape = [int.from_bytes(shape[at : at + 4], order) for at in range(0, len(shape), 4)]
        self.name = name

    def field(self, name: bytes) -> _Array:
        """A field of the struct's first element."""
        if self.kind != _STRUCT_CLASS:
            raise ValueError("its variable is not a struct")
        length = int.from_bytes(next(self._parts, (0, b""))[1], self._order)
        text = next(self._parts, (0, b""))[1]
        names = [text[at : at + length].rstrip(b"\0") for at in range(0, len(text), max(length, 1))]
        for here, (_, data) in zip(names, self._parts):
            if here == name:
                return _Array(data, self._order)
        raise ValueError(f"its struct has no field {name.decode()}")

    def bytes(self) -> ByteArray:
        """The matrix, which is stored column by column."""
        kind, data = next(self._parts, (0, b""))
        height, width = self.shape if len(self.shape) == 2 else (0, 0)
        if (self.kind, kind) != (_UINT8_CLASS, _UINT8) or not data or len(data) != height * width:
            raise ValueError("its field is not a matrix of bytes")
        return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(width, height).T)


def _elements(data: bytes, order: Order) -> Iterator[tuple[int, bytes]]:
    """The type and the data of each element; one of up to four bytes stands within its tag."""
    at = 0
    while at + 8 <= len(data):
        word, size = (int.from_bytes(data[at + k : at + k + 4], order) for k in (0, 4))
        if word >> 16:
            kind, size, start, end = word & 0xFFFF, word >> 16, at + 4, at + 8
        else:
            kind, start = word, at + 8
            end = start + (size if kind == _COMPRESSED else -(-size // 8) * 8)
        if start + size > len(data) or start + size > end:
            raise ValueError("it is cut off, or an element has a wrong length")
        yield kind, data[start : start + size]
        at = end


def _decompressed(data: bytes, most: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        out = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"it cannot be decompressed ({error})") from None
    if len(out) > most:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes after decompression")
    if not stream.eof:
        raise ValueError("it is cut off")
    return out
