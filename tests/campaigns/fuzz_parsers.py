"""Coverage-guided fuzzing of the parsers that are our own: JPEG headers, JSON, XML, lists, arguments, dates.

    pip install atheris==3.0.0 && python -m tests.campaigns.fuzz_parsers -runs=200000

What ends in anything but a value or a ValueError is a crash, which atheris writes to a file.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

with atheris.instrument_imports(
    include=[
        "dataset.store.images",
        "dataset.flair.sources",
        "dataset.fetch.annotated",
        "dataset.fetch.coco",
        "dataset.fetch.http",
        "dataset.fetch.outlines",
        "dataset.fetch.voc",
        "dataset.cityscapes.source",
        "dataset.sbd.matlab",
    ]
):
    from dataset.cityscapes import source as cityscapes
    from dataset.fetch import coco, voc
    from dataset.fetch.annotated import Reading, read_users
    from dataset.fetch.http import retry_after
    from dataset.fetch.json_stream import elements
    from dataset.sbd.matlab import byte_matrix
    from dataset.store.images import jpeg_size

MASK = "_gtFine_labelIds.png"
PATH = Path(tempfile.mkdtemp()) / "list.json"


def one(data: bytes) -> None:
    """Give one input to the parser that its first byte chooses."""
    kind, rest = (data[0] % 9 if data else 0), data[1:]
    with contextlib.suppress(ValueError):
        if kind == 0:
            jpeg_size(rest)
        elif kind == 1:
            jpeg_size(b"\xff\xd8" + rest + b"\xff\xd9")
        elif kind == 2:
            PATH.write_bytes(b"[" + rest)
            list(elements(PATH, "FLAIR"))
        elif kind == 3:
            retry_after(rest.decode("latin-1"), 1.0)
        elif kind == 4:
            for form in ("boxes", "mask"):
                coco.read({"instances_train.json": rest}, "here", Reading(form, cut=rest[:1] == b" "))
        elif kind == 5:
            files = {"ImageSets/train.txt": b"1", "Annotations/1": rest}
            voc.read(files, "here", Reading("boxes", cut=rest[:1] == b" "))
        elif kind == 6:
            read_users(rest, "here")
        elif kind == 7:
            cityscapes.read({f"train/a/a_0_0{MASK}": rest}, "here", Reading("mask"))
        else:
            byte_matrix(bytes(126) + rest, "GTcls", "Segmentation")


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
