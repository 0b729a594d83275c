"""Reads a serialised ``tf.train.Example`` without TensorFlow.

Protocol Buffers' wire format: a field is a number and a kind (varint, 8 bytes, length and bytes, 4 bytes),
then its value. An Example has Features (1), a map (1) from a name (1) to a Feature (2), which is a list of
bytes (1), of float32 (2) or of int64 (3), whose values (1) may be packed into one field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_FLOATS, _INTEGERS = 2, 3


def parse(data: bytes, where: str) -> dict[str, npt.NDArray[Any]]:
    """The features of numbers by name: float32 or int64, ``[values]``. Features of bytes are left out.

    Raises:
        ValueError: that says where, for other bytes than those of an Example.
    """
    try:
        return dict(_features(data))
    except (ValueError, IndexError, OverflowError) as fault:
        raise ValueError(f"{where} is not a serialised tf.train.Example ({fault})") from None


def _features(data: bytes) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for features in _nested(data, 1):
        for entry in _nested(features, 1):
            name = b"".join(list(_nested(entry, 1))[-1:]).decode()
            for feature in list(_nested(entry, 2))[-1:]:
                for kind, values in _fields(feature):
                    if kind in (_FLOATS, _INTEGERS) and isinstance(values, bytes):
                        yield name, _values(values, kind)


def _values(data: bytes, kind: int) -> npt.NDArray[Any]:
    if kind == _FLOATS:  # packed into one field, or four bytes each
        return np.frombuffer(b"".join(_nested(data, 1)), "<f4").astype(np.float32)
    found = [
        _integers(value) if isinstance(value, bytes) else np.array([value], np.uint64)
        for number, value in _fields(data)
        if number == 1
    ]
    return np.concatenate([np.empty(0, np.uint64), *found]).astype(np.int64)


def _integers(packed: bytes) -> npt.NDArray[np.uint64]:
    """Varints one after another: seven bits a byte, the lowest first; the last byte of each is below 128."""
    data = np.frombuffer(packed, np.uint8)
    if not len(data):
        return np.empty(0, np.uint64)
    if data[-1] > 127:
        raise ValueError("a number is cut off")
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a number has more than ten bytes")
    place = np.arange(len(data)) - np.repeat(starts, lengths)
    return np.add.reduceat((data & 127).astype(np.uint64) << (7 * place).astype(np.uint64), starts)


def _nested(data: bytes, wanted: int) -> Iterator[bytes]:
    """The values of the fields with this number that are bytes: messages, text, packed or 4-byte numbers."""
    return (value for number, value in _fields(data) if number == wanted and isinstance(value, bytes))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and the value of each field; a varint's value is an integer."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        else:
            length = {_EIGHT: 8, _FOUR: 4}.get(kind, -1)
        if length < 0 or at + length > len(data):
            raise ValueError(f"a field of type {kind} is cut off, or this type does not exist")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint of at most 64 bits, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("a number has more than ten bytes")
