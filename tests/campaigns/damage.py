"""Ways to damage bytes: what a disk, a network or an enemy does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

HOSTILE = (
    b"\x00" * 8,
    b"\xff" * 8,
    (2**31 - 1).to_bytes(4, "little"),
    (2**31 - 1).to_bytes(4, "big"),
    (2**40).to_bytes(8, "little"),
    (2**63 - 1).to_bytes(8, "little"),
    b"\x7f\xff\xff\xff",
    b"\xff\xff",
)
WORDS = (
    b"[" * 20_000,
    b"{" * 2_000,
    b'{"a":' * 20_000,
    b"- " * 3_000,
    b"9" * 6_000,
    b"1e999",
    b"-1",
    b"0",
    b".nan",
    b"null",
    b"~",
    b"true",
    b"&a [*a, *a]",
    b"*a",
    b"<<: *a",
    b"!!python/object/apply:os.system [id]",
    b"!!binary aGk=",
    b"2001-99-99",
    b"? [x] : y",
    b"\x00",
    b"\xff\xfe",
    b"\xe2\x80\xa8",
    b'"',
    b"'",
    b":",
    b"\n",
    b"\t",
    b"%s%n",
    b"../../../etc/passwd",
    b"A" * 70_000,
)


def damaged(seed: bytes, others: Sequence[bytes], rng: np.random.Generator, text: bool) -> bytes:
    """The bytes after one to four accidents. Texts are also given words that parsers stumble over."""
    content = bytearray(seed)
    for _ in range(int(rng.integers(1, 5))):
        size = max(len(content), 1)
        at = int(rng.integers(size))
        length = int(rng.integers(1, 1 + min(size, 2 ** int(rng.integers(1, 12)))))
        match int(rng.integers(10)):
            case 0 | 1:
                for place in rng.integers(size, size=int(rng.integers(1, 9))).tolist():
                    if content:
                        content[place] ^= 1 << int(rng.integers(8))
            case 2:
                del content[at:]
            case 3:
                del content[at : at + length]
            case 4:
                content[at:at] = content[at : at + length]
            case 5:
                content[at : at + length] = rng.bytes(length)
            case 6 | 7:
                word = (WORDS if text else HOSTILE)[int(rng.integers(len(WORDS if text else HOSTILE)))]
                content[at : at + (0 if text else len(word))] = word
            case 8:
                other = others[int(rng.integers(len(others)))]
                start = int(rng.integers(max(len(other), 1)))
                content[at : at + length] = other[start : start + length]
            case _:
                content[at : at + length] = bytes(length)
    return bytes(content)
