"""PNG, WebP and GIF images, turned into JPEGs or pixels.

A file keeps the bytes of JPEGs as they are. Images of other formats are decoded and encoded as JPEG, without
chroma subsampling, at a quality that the file records. What a JPEG cannot hold is brought into it by rule:
transparent images are laid over a background, 16 bits become 8 by leaving out the lower byte, and of an
animation the first frame is taken. Colour profiles and orientation are ignored, as they are for JPEGs.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image

from dataset.store.images import Pixels, refuse_size

Background = Literal["white", "black", "grey"]
BACKGROUNDS: tuple[Background, ...] = get_args(Background)
_LEVELS = {"white": 255, "black": 0, "grey": 128}
_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "PNG", b"GIF87a": "GIF", b"GIF89a": "GIF"}
_PNG_DEPTH_AT = 24  # of the bit depth in a PNG: after the signature, and length, name and size in IHDR


@dataclass(frozen=True)
class Transcoding:
    """How images that are no JPEGs become JPEGs.

    Attributes:
        quality: of the JPEG, 1 to 100, as libjpeg counts.
        background: what transparent images are laid over.

    Raises:
        ValueError: for a quality out of range.
    """

    quality: int = 95
    background: Background = "white"

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 100:
            raise ValueError(f"--jpeg_quality is {self.quality}; give a number from 1 to 100")


def other_format(data: bytes | memoryview) -> str | None:
    """``PNG``, ``WEBP`` or ``GIF``; None for a JPEG and for whatever else."""
    head = bytes(data[:12])
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        return "WEBP"
    return next((name for start, name in _SIGNATURES.items() if head.startswith(start)), None)


def to_pixels(data: bytes | memoryview, background: Background) -> tuple[Pixels, str]:
    """The image as RGB, ``[H, W, 3]``, and what was done to it: ``PNG of 16 bits``, ``GIF, its first frame``.

    Raises:
        ValueError: with a clause that says what is wrong.
    """
    name = other_format(data)
    if name is None:
        raise ValueError("it is none of JPEG, PNG, WebP and GIF" if data else "it is empty")
    data = bytes(data)
    try:
        with Image.open(io.BytesIO(data), formats=[name]) as image:
            refuse_size(*image.size, data)
            note = {"WEBP": "WebP"}.get(name, name)
            if name == "PNG" and data[_PNG_DEPTH_AT] == 16:
                note += " of 16 bits"
            if getattr(image, "is_animated", False):
                note += ", its first frame"
                image.seek(0)
            if image.mode.startswith("I"):  # 16 bits of grey
                levels = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
                return np.repeat(levels[:, :, None], 3, axis=2), note
            if image.has_transparency_data:
                level = _LEVELS[background]
                below = Image.new("RGBA", image.size, (level, level, level, 255))
                flat = Image.alpha_composite(below, image.convert("RGBA"))
                return np.asarray(flat.convert("RGB")), f"{note}, laid over {background}"
            return np.asarray(image.convert("RGB")), note
    except (OSError, ValueError, SyntaxError, TypeError, IndexError, EOFError, OverflowError) as error:
        raise ValueError(f"it cannot be decoded ({' '.join(str(error).split())})") from None


def to_jpeg(data: bytes | memoryview, transcoding: Transcoding) -> tuple[bytes, str]:
    """The same bytes for the same image and transcoding; and what was done, as `to_pixels` says.

    Raises:
        ValueError: with a clause that says what is wrong.
    """
    pixels, note = to_pixels(data, transcoding.background)
    buffer = io.BytesIO()
    try:
        Image.fromarray(pixels).save(buffer, "JPEG", quality=transcoding.quality, subsampling=0)
    except (OSError, ValueError) as error:  # a side of more than 65,500 pixels
        raise ValueError(f"it cannot be made a JPEG ({' '.join(str(error).split())})") from None
    return buffer.getvalue(), note
