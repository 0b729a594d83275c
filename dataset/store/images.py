"""JPEG bytes to pixels: a header check that costs microseconds, decoding, resizing; other formats to JPEG.

Shape letters: N images, S side in pixels. One definition of "this image at S x S" serves the preprocessing
and the reader, so that raw storage at S and JPEG storage read at S hold the same pixels, bit for bit.

A file keeps the bytes of JPEGs unchanged. PNG, WebP, GIF, BMP and TIFF images are decoded and
encoded as JPEG, without chroma subsampling, at a quality that the file records. Features that a JPEG cannot
have are converted by rule: transparent images are laid over a background, 16 bits become 8 by dropping the
lower byte, and of an animation the first frame is taken. Colour profiles are ignored, as they are for JPEGs,
and so is the orientation that a camera notes, unless images are to stand upright; that of a TIFF is never
ignored, as Pillow turns it during decoding.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import simplejpeg  # type: ignore[import-untyped]
from PIL import Image

from dataset.arrays import ByteArray

Pixels = ByteArray

MAX_PIXELS = 1 << 26
MAX_PIXELS_PER_BYTE = 1024
"""Most pixels for a byte beyond the first 2^20 pixels. A JPEG of a single colour has about 350."""
MAX_SCANS = 100
"""Most scans of a JPEG. A progressive one has about ten; each costs a pass over the whole image."""

_START, _END = b"\xff\xd8", b"\xff\xd9"
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF markers: they hold height and width
_SCAN, _APP1 = 0xDA, 0xE1
_SEGMENT = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
"""The marker of a segment, which has a length, or of the end; not a scan's escapes and restarts."""


def jpeg_size(data: bytes | memoryview) -> tuple[int, int]:
    """Width and height from a JPEG's header; pixels are not decoded (ITU-T T.81, Annex B).

    It walks the segments to the first scan and looks for the end marker behind it. So it detects a file that
    is no JPEG, is cut off, or has a broken header, but not a flipped bit in the pixels.

    Raises ValueError with a clause that says what is wrong.
    """
    data = bytes(data)
    if data[:2] != _START:
        raise ValueError("it is not a JPEG (no start marker)" if data else "it is empty")
    size, scan = None, 0
    for marker, at, end in _segments(data):
        scan = end
        if marker in _FRAMES:
            size = int.from_bytes(data[at + 3 : at + 5], "big"), int.from_bytes(data[at + 1 : at + 3], "big")
    if size is None or 0 in size:
        raise ValueError("its JPEG header has no size")
    if data.rfind(_END) < scan:
        raise ValueError("it is cut off (no JPEG end marker)")
    _refuse_bomb(*size, data)
    return size


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """A JPEG's segments up to its first scan: marker, start and end of the content.

    Raises ValueError with a clause that says what is wrong.
    """
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise ValueError("its JPEG header is broken")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if length < 2:
            raise ValueError("its JPEG header is broken")
        yield marker, at + 4, at + 2 + length
        at += 2 + length
        if marker == _SCAN:
            return
    raise ValueError("its JPEG header is cut off")


def refuse_size(width: int, height: int, data: bytes | memoryview) -> None:
    """Raise ValueError for a declared size that is too large, or impossible for this number of bytes."""
    pixels = width * height
    if pixels > MAX_PIXELS or pixels > (1 << 20) + MAX_PIXELS_PER_BYTE * len(data):
        raise ValueError(f"it declares {width} x {height} pixels in {len(data):,} bytes")


def _refuse_bomb(width: int, height: int, data: bytes | memoryview) -> None:
    """Raise ValueError as `refuse_size` does, and for a JPEG with too many scans."""
    refuse_size(width, height, data)
    data = bytes(data)
    if data.count(b"\xff\xda") > MAX_SCANS and _num_scans(data) > MAX_SCANS:
        raise ValueError(f"it has more than {MAX_SCANS} scans")


def _num_scans(data: bytes) -> int:
    """The scans of a JPEG up to its end marker, behind which there may be a video; at most one too many."""
    at, count = 2, 0
    while count <= MAX_SCANS and (found := _SEGMENT.search(data, at)) is not None and found[1] != _END[1:]:
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
        count += found[1][0] == _SCAN
    return count


def decode(data: bytes | memoryview, image_size: int | None, out: Pixels | None = None) -> Pixels:
    """The image as RGB, ``[S, S, 3]`` uint8 with S = ``image_size``, or in its own size if that is None.

    The decoder is libjpeg-turbo in strict mode. Pillow, which gives the same pixels in twice the time,
    silently paints over damage. Of photographs with 200 bytes of the stream zeroed, 200 randomised, or the
    second half removed, 77, 95 and 100 % are refused (by Pillow 0, 56 and 0 %). After a single flipped bit 17
    % are, since most are still valid JPEGs.

    An image of another size is resized (antialiased bilinear; an oblong image is squashed to a square). A
    JPEG of more than twice the side is decoded at a fraction of its size, but at no less than 2 S: on
    photographs of 256 pixels read at 64 this moves pixels by 0.6 of 255 levels on average.

    With ``out``, which has the result's shape, the pixels are written there.

    Raises ValueError with a clause that says what is wrong.
    """
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        _refuse_bomb(width, height, data)
        fraction = 1
        while image_size is not None and fraction < 8 and min(height, width) >= 4 * image_size * fraction:
            fraction *= 2
        height, width = -(-height // fraction), -(-width // fraction)
        if space in ("CMYK", "YCCK"):  # libjpeg does not convert these
            with Image.open(io.BytesIO(data)) as image:
                pixels = np.asarray(image.convert("RGB"))
        else:
            buffer = out if out is not None and out.shape == (height, width, 3) else None
            pixels = simplejpeg.decode_jpeg(
                data, "RGB", min_height=height, min_width=width, buffer=buffer, strict=True
            )
            if buffer is not None:
                return buffer
    except (OSError, ValueError) as error:
        raise ValueError(f"it cannot be decoded ({' '.join(str(error).split())})") from None
    pixels = pixels if image_size is None else resized(pixels, image_size)
    if out is not None:
        out[...] = pixels
    return pixels


def resize(pixels: Pixels, image_size: int) -> Pixels:
    """``[N, H, W, 3]`` uint8 to ``[N, S, S, 3]``, as `decode` resizes."""
    if pixels.shape[1:3] == (image_size, image_size):
        return pixels
    if not len(pixels):
        return np.empty((0, image_size, image_size, 3), np.uint8)
    return np.stack([resized(image, image_size) for image in pixels])


def resized(pixels: Pixels, image_size: int) -> Pixels:
    """``[H, W, 3]`` uint8 to ``[S, S, 3]``, as `decode` resizes."""
    if pixels.shape[:2] == (image_size, image_size):
        return pixels
    size = (image_size, image_size)
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))


_UNDECODABLE = (
    OSError, ValueError, SyntaxError, TypeError, IndexError, EOFError, OverflowError,
    Image.DecompressionBombError,
)  # fmt: skip
"""Pillow's exceptions for damaged images, and for those that declare more pixels than it opens."""
Background = Literal["white", "black", "grey"]
BACKGROUNDS: tuple[Background, ...] = get_args(Background)
_LEVELS = {"white": 255, "black": 0, "grey": 128}
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}
DEEP = " of 16 bits"
"""What is said of such images; their upper 8 bits are kept."""
_TIFF_DEPTHS = 258  # the tag of the bits of each channel
_PNG_DEPTH_AT = 24  # of the bit depth in a PNG: after the signature, and length, name and size in IHDR


_EXIF = re.compile(rb"(Exif\0\0|eXIf|EXIF....)(?P<tiff>II\*\0|MM\0\*)", re.DOTALL)  # of JPEG, PNG and WebP
_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II": "little", b"MM": "big"}
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image stand upright, by its EXIF orientation."""


@dataclass(frozen=True)
class Transcoding:
    """How images that are no JPEGs become JPEGs.

    Attributes:
        quality: the JPEG's quality, 1 to 100, on libjpeg's scale.
        background: the colour over which transparent images are laid.
        upright: whether images that their EXIF orientation turns, JPEGs among them, are turned so.

    Raises:
        ValueError: for a quality out of range.
    """

    quality: int = 95
    background: Background = "white"
    upright: bool = False

    def changes(self, data: bytes | memoryview) -> bool:
        """Whether an image is not kept as it is: it is no JPEG, or is to be turned."""
        return bytes(data[:2]) != _START or (self.upright and orientation(data) in _TURNS)

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 100:
            raise ValueError(f"--jpeg_quality is {self.quality}; give a whole number from 1 to 100")


def other_format(data: bytes | memoryview) -> str | None:
    """``PNG``, ``WEBP``, ``GIF``, ``BMP`` or ``TIFF``; None for a JPEG and for anything else."""
    head = bytes(data[:12])
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        return "WEBP"
    return next((name for start, name in _SIGNATURES.items() if head.startswith(start)), None)


def _exif_of_jpeg(data: bytes) -> bytes:
    """The content of a JPEG's segment with EXIF; behind the image there may be another one with its own."""
    try:
        for marker, at, end in _segments(data):
            if marker == _APP1 and data.startswith(b"Exif\0\0", at):
                return data[at:end]
    except ValueError:  # whoever decodes it says so
        pass
    return b""


def orientation(data: bytes | memoryview) -> int:
    """An image's EXIF orientation, 1 to 8; 1, upright, where it has none that can be read."""
    data = bytes(data)
    if data[:2] == _START:
        data = _exif_of_jpeg(data)
    found = _EXIF.search(data)
    if found is None:
        return 1
    at, order = found.start("tiff"), _ORDERS[found["tiff"][:2]]
    at += int.from_bytes(data[at + 4 : at + 8], order)
    for entry in range(int.from_bytes(data[at : at + 2], order)):
        start = at + 2 + 12 * entry
        if int.from_bytes(data[start : start + 2], order) == _ORIENTATION:
            value = int.from_bytes(data[start + 8 : start + 10], order)
            return value if value in _TURNS else 1
    return 1


def to_pixels(data: bytes | memoryview, background: Background, upright: bool = False) -> tuple[Pixels, str]:
    """The image as RGB, ``[H, W, 3]``, and what was done to it: ``PNG of 16 bits``, ``GIF, its first frame``.

    Raises:
        ValueError: with a clause that says what is wrong.
    """
    if upright and (turn := _TURNS.get(orientation(data))) is not None:
        is_jpeg = other_format(data) is None
        pixels, note = (decode(data, None), "JPEG") if is_jpeg else to_pixels(data, background)
        return np.asarray(Image.fromarray(pixels).transpose(turn)), f"{note}, turned upright"
    name = other_format(data)
    if name is None:
        raise ValueError("it is not a JPEG, PNG, WebP, GIF, BMP or TIFF image" if data else "it is empty")
    data = bytes(data)
    try:
        with Image.open(io.BytesIO(data), formats=[name]) as image:
            refuse_size(*image.size, data)
            note = {"WEBP": "WebP"}.get(name, name)
            if name == "PNG" and data[_PNG_DEPTH_AT] == 16:
                note += DEEP
            if name == "TIFF" and np.max(image.tag_v2.get(_TIFF_DEPTHS, 1)) == 16:  # type: ignore[attr-defined]
                note += DEEP
            if getattr(image, "is_animated", False):
                note += ", its first frame"
                image.seek(0)
            if name == "TIFF" and image.mode in ("I", "F"):
                raise ValueError("its pixels have 32 bits and an unknown range: save it with 8 or 16 bits")
            if image.mode.startswith("I"):  # 16 bits of grey
                levels = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
                return np.repeat(levels[:, :, None], 3, axis=2), note
            if image.has_transparency_data:
                level = _LEVELS[background]
                below = Image.new("RGBA", image.size, (level, level, level, 255))
                flat = Image.alpha_composite(below, image.convert("RGBA"))
                return np.asarray(flat.convert("RGB")), f"{note}, laid over {background}"
            return np.asarray(image.convert("RGB")), note
    except _UNDECODABLE as error:
        raise ValueError(f"it cannot be decoded ({' '.join(str(error).split())})") from None


def to_jpeg(data: bytes | memoryview, transcoding: Transcoding) -> tuple[bytes, str]:
    """A JPEG, the same bytes for the same image and transcoding; and what was done, as `to_pixels` says.

    Raises:
        ValueError: with a clause that says what is wrong.
    """
    pixels, note = to_pixels(data, transcoding.background, transcoding.upright)
    return encoded(pixels, transcoding.quality), note


def encoded(pixels: Pixels, quality: int) -> bytes:
    """Pixels as JPEG, without chroma subsampling.

    Raises:
        ValueError: with a clause that says what is wrong.
    """
    buffer = io.BytesIO()
    try:
        Image.fromarray(pixels).save(buffer, "JPEG", quality=quality, subsampling=0)
    except (OSError, ValueError) as error:  # a side of more than 65,500 pixels
        raise ValueError(f"it cannot be converted to JPEG ({' '.join(str(error).split())})") from None
    return buffer.getvalue()
