"""Images that are no JPEGs: the same pixels in the file as in the source, as far as a JPEG can hold them."""

from __future__ import annotations

import io
import os
import signal
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from dataset.arrays import ByteArray
from dataset.cli import run
from dataset.flair.download_preprocess import main
from dataset.journal import Journal
from dataset.store.hdf5 import DataFile
from dataset.store.images import Transcoding, decode, orientation, other_format, to_jpeg, to_pixels
from dataset.store.validate import validate
from tests.dataset.drawn import SIDE, Record, assert_paired, draw, png, records, write_parquet

Make = Callable[[ByteArray], bytes]


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def palette(pixels: ByteArray) -> bytes:
    return saved(Image.fromarray(pixels).quantize(16), "PNG")


def one_bit(pixels: ByteArray) -> bytes:
    return saved(Image.fromarray(pixels).convert("1"), "PNG")


def webp(pixels: ByteArray) -> bytes:
    return saved(Image.fromarray(pixels), "WEBP", lossless=True)


def gif(pixels: ByteArray) -> bytes:
    return saved(Image.fromarray(pixels), "GIF")


def bmp(pixels: ByteArray) -> bytes:
    return saved(Image.fromarray(pixels), "BMP")


def tiff(pixels: ByteArray) -> bytes:
    return saved(Image.fromarray(pixels), "TIFF", compression="tiff_lzw")


def animation(pixels: ByteArray) -> bytes:
    other = Image.fromarray(255 - pixels)
    return saved(Image.fromarray(pixels), "GIF", save_all=True, append_images=[other, other])


def rgba(pixels: ByteArray) -> bytes:
    """White is transparent, and what lies there is red."""
    alpha = np.where(pixels[..., :1] > 127, 0, 255).astype(np.uint8)
    colour = np.where(pixels > 127, np.array([255, 0, 0], np.uint8), pixels)
    return saved(Image.fromarray(np.concatenate([colour, alpha], 2)), "PNG")


def grey16(pixels: ByteArray) -> bytes:
    return saved(Image.fromarray(pixels[..., 0].astype(np.uint16) * 257), "PNG")


def tiff16(pixels: ByteArray) -> bytes:
    return saved(Image.fromarray(pixels[..., 0].astype(np.uint16) * 257), "TIFF", compression="tiff_lzw")


def rgb16(pixels: ByteArray) -> bytes:
    """Pillow does not write these: signature, IHDR, IDAT, IEND."""
    height, width, _ = pixels.shape
    wide = pixels.astype(">u2") * 256 + 77
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in wide)

    def chunk(name: bytes, content: bytes) -> bytes:
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    idat = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + idat + chunk(b"IEND", b"")


MAKERS: dict[str, tuple[Make, str]] = {
    "png": (png, "PNG"),
    "palette": (palette, "PNG"),
    "one bit": (one_bit, "PNG"),
    "webp": (webp, "WebP"),
    "gif": (gif, "GIF"),
    "animation": (animation, "GIF, its first frame"),
    "bmp": (bmp, "BMP"),
    "tiff": (tiff, "TIFF"),
    "rgba": (rgba, "PNG, laid over white"),
    "grey16": (grey16, "PNG of 16 bits"),
    "rgb16": (rgb16, "PNG of 16 bits"),
    "tiff16": (tiff16, "TIFF of 16 bits"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_format_gives_the_pixels_that_were_drawn(name: str) -> None:
    """Black and white cells of eight pixels: a JPEG without subsampling holds them almost exactly."""
    make, note = MAKERS[name]
    drawn = draw(12345)
    pixels, said = to_pixels(make(drawn), "white")
    np.testing.assert_array_equal(pixels, drawn)
    assert said == note
    jpeg, said = to_jpeg(make(drawn), Transcoding())
    assert said == note
    assert np.abs(decode(jpeg, None).astype(int) - drawn).max() <= 4
    assert to_jpeg(make(drawn), Transcoding())[0] == jpeg


def test_what_is_transparent_shows_the_background_and_nothing_that_lies_under_it() -> None:
    drawn = draw(12345)
    for background, level in (("white", 255), ("black", 0), ("grey", 128)):
        pixels, _ = to_pixels(rgba(drawn), background)  # type: ignore[arg-type]
        np.testing.assert_array_equal(pixels, np.where(drawn > 127, level, drawn))
    half = np.full((4, 4, 4), (200, 100, 0, 128), np.uint8)
    pixels, _ = to_pixels(saved(Image.fromarray(half), "PNG"), "white")
    exact = 255 + (half[0, 0, :3].astype(float) - 255) * 128 / 255
    assert np.abs(pixels[0, 0] - exact).max() <= 1


def test_sixteen_bits_become_eight_over_the_whole_range() -> None:
    """Not clipped at 255, as a plain conversion does."""
    levels = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    pixels, _ = to_pixels(saved(Image.fromarray(levels), "PNG"), "white")
    np.testing.assert_array_equal(pixels[..., 1], levels >> 8)


@pytest.mark.parametrize(
    "data, said",
    [
        (png(draw(7))[:70], "it cannot be decoded"),
        (gif(draw(7))[:40], "it cannot be decoded"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "it cannot be decoded"),
        (saved(Image.new("1", (9000, 9000)), "PNG"), "it declares 9000 x 9000 pixels in"),
        (b"<html>", "it is not a JPEG, PNG, WebP, GIF, BMP or TIFF image"),
        (saved(Image.new("F", (4, 4)), "TIFF"), "its pixels have 32 bits and an unknown range: save it"),
        (b"", "it is empty"),
    ],
)
def test_what_cannot_be_decoded_is_a_clause(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        to_pixels(data, "white")


def test_an_image_wider_than_a_jpeg_can_be_is_a_clause() -> None:
    with pytest.raises(ValueError, match="it cannot be converted to JPEG"):
        to_jpeg(saved(Image.new("1", (65_536, 1)), "PNG"), Transcoding())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, for a damaged TIFF
@given(st.sampled_from([png, webp, gif, bmp, tiff]), st.data())
def test_damaged_bytes_are_pixels_or_a_clause(make: Make, data: st.DataObject) -> None:
    content = bytearray(make(draw(7)))
    for _ in range(3):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    message = ""
    try:
        pixels, _ = to_pixels(bytes(content), "white")
        assert pixels.ndim == 3
    except ValueError as error:
        message = str(error)
    assert "\n" not in message


def mixed() -> list[Record]:
    """60 records, the first of each format that there is."""
    rows = records(60)
    for at, (make, _) in enumerate(MAKERS.values()):
        rows[at] = replace(rows[at], image=make(draw(rows[at].number)))
    return rows


COUNTS = {
    "BMP": 1, "TIFF": 1, "GIF": 1, "GIF, its first frame": 1, "PNG": 3, "PNG of 16 bits": 2,
    "PNG, laid over white": 1, "WebP": 1, "TIFF of 16 bits": 1,
}  # fmt: skip


@pytest.mark.parametrize("storage", ["jpeg", "raw"])
def test_a_source_of_many_formats_is_preprocessed_and_says_what_it_did(
    tmp_path: Path, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = mixed()
    folder, output = write_parquet(tmp_path / "in", rows), tmp_path / "f.hdf5"
    words = [f"--source={folder}", f"--output_file={output}", f"--storage={storage}", "--jpeg_quality=90"]
    assert run(main, words + ([f"--image_size={SIDE}"] if storage == "raw" else [])) == 0
    validate(output)
    said = capsys.readouterr().err
    line = next(one for one in said.splitlines() if one.startswith("12 images become "))
    assert ("become JPEGs of quality 90" in line) == (storage == "jpeg")
    assert all(f"{count} {note}" in line for note, count in COUNTS.items())
    assert "WARNING" not in said
    with DataFile(output) as file:
        transcoded = file.provenance["transcoded"]
        assert (transcoded["images"], transcoded["background"]) == (COUNTS, "white")
        assert transcoded.get("jpeg_quality") == (90 if storage == "jpeg" else None)
    assert_paired(output, rows)


def test_a_resumed_preprocessing_has_the_same_bytes_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_parquet(tmp_path / "in", mixed())
    words = [f"--source={folder}", "--storage=jpeg", "--workers=1"]
    assert run(main, [*words, f"--output_file={tmp_path / 'whole.hdf5'}"]) == 0
    real, calls = Journal.put, [0]

    def stopped(self: Journal, name: str, content: bytes) -> None:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, name, content)

    monkeypatch.setattr(Journal, "put", stopped)
    assert run(main, [*words, f"--output_file={tmp_path / 'resumed.hdf5'}"]) == 75
    monkeypatch.undo()
    assert run(main, [*words, f"--output_file={tmp_path / 'resumed.hdf5'}"]) == 0
    with DataFile(tmp_path / "whole.hdf5") as whole, DataFile(tmp_path / "resumed.hdf5") as resumed:
        assert whole.fingerprint == resumed.fingerprint
        assert whole.provenance["transcoded"] == resumed.provenance["transcoded"]


def test_another_quality_gives_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, prints = write_parquet(tmp_path / "in", mixed()), set()
    for quality in (50, 95):
        output = tmp_path / f"{quality}.hdf5"
        assert run(main, [f"--source={folder}", f"--output_file={output}", f"--jpeg_quality={quality}"]) == 0
        with DataFile(output) as file:
            prints.add(file.fingerprint)
    assert len(prints) == 2
    capsys.readouterr()
    assert run(main, [f"--source={folder}", f"--output_file={tmp_path / 'f'}", "--jpeg_quality=0"]) == 2
    assert capsys.readouterr().err == "error: --jpeg_quality is 0; give a whole number from 1 to 100\n"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("turn", range(1, 10))
def test_an_image_is_turned_as_its_exif_says(turn: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    image = Image.fromarray(np.ascontiguousarray(draw(7)[:, :20]))
    data = saved(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    with Image.open(io.BytesIO(data)) as stored:
        expected = np.asarray(ImageOps.exif_transpose(stored).convert("RGB"))
    assert orientation(data) == (turn if 1 < turn < 9 else 1)
    how = Transcoding(upright=True)
    assert how.changes(data) == (kind != "JPEG" or 1 < turn < 9)
    if how.changes(data):
        pixels, said = to_pixels(data, "white", upright=True)
        assert np.array_equal(pixels, expected)
        assert said.endswith("turned upright") == (1 < turn < 9)
        assert decode(to_jpeg(data, how)[0], None).shape == expected.shape


def test_exif_behind_a_jpeg_or_in_another_segment_is_not_its_own() -> None:
    """As in a photo with a second picture behind it, and one that only mentions EXIF."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(draw(7))
    turned = saved(image, "JPEG", exif=exif)
    assert orientation(saved(image, "JPEG") + turned) == 1
    assert orientation(saved(image, "JPEG", comment=turned[turned.index(b"Exif") :][:60])) == 1
    assert orientation(turned[:2] + b"\xff\xe1\0\x08http" + b"\0\0" + turned[2:]) == 6


def test_tiffs_are_always_turned() -> None:
    image = Image.fromarray(np.ascontiguousarray(draw(7)[:, :20]))
    pixels, _ = to_pixels(saved(image, "TIFF", tiffinfo={0x0112: 6}), "white")
    assert np.array_equal(pixels, np.asarray(image.transpose(Image.Transpose.ROTATE_270)))


def test_damaged_exif_is_none() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = saved(Image.fromarray(draw(7)), "JPEG", exif=exif)
    at, rng = whole.index(b"Exif"), np.random.default_rng(0)
    for _ in range(300):
        content = bytearray(whole)
        for place in rng.integers(at + 4, at + 40, size=3):
            content[place] = rng.integers(256)
        assert 1 <= orientation(bytes(content)) <= 8


def test_jpegs_are_told_from_the_rest_by_their_first_bytes() -> None:
    drawn = draw(7)
    assert other_format(saved(Image.fromarray(drawn), "JPEG")) is None
    names = [other_format(make(drawn)) for make in (png, webp, gif, bmp, tiff)]
    assert names == ["PNG", "WEBP", "GIF", "BMP", "TIFF"]
    assert other_format(b"<html>") is None
