"""Draws the mini data set: from hashes instead of random streams, with one mark for each label of an image.

Shape letters: N images, M marks, S side in pixels.

An image is its user's background (two colours, a wave, a colour cast, a noise level) under one mark for each
of its fine labels. The mark's silhouette and hue tell the coarse label; its shade and its stripes' width and
direction tell the fine label. Place, size, tilt, opacity, brightness and noise are random per image; marks
overlap, and confetti in all labels' colours lies over them.

Portability: everything random is a 64- or 32-bit integer hash, and pixels come from single-precision sums,
products, quotients, square roots and comparisons alone, each rounded as IEEE 754 demands, in an order that
does not depend on the batch. So the pixels are the same for any numpy, machine, and choice of rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.arrays import ByteArray, Float32Array, FloatArray, IntArray

Keys = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SPECKS = 12  # per image
_BACKGROUND = np.float32(0.25)  # its opacity
_CHUNK_PIXELS = 1 << 16  # images are drawn so many pixels at a time, to stay in the processor's cache


def _scramble(keys: Keys) -> Keys:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit integers."""
    keys = keys + _GOLDEN
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def keyed(seed: int, purpose: str, *parts: npt.ArrayLike) -> Keys:
    """A 64-bit hash of (seed, purpose, parts); the non-negative integer parts broadcast."""
    keys = _scramble(np.array([seed], np.uint64)) ^ np.uint64(zlib.crc32(purpose.encode()))
    for part in parts:
        keys = _scramble(_scramble(keys) ^ np.asarray(part).astype(np.uint64))
    return _scramble(keys)


def uniform(keys: Keys) -> FloatArray:
    """Keys to numbers strictly between 0 and 1."""
    return (((keys >> np.uint64(12)) + 0.5) * 2.0**-52).astype(np.float64)


def _shares(keys: Keys) -> list[Float32Array]:
    """Eight independent numbers in [0, 1] from each key: its bytes."""
    octets = [(keys >> np.uint64(8 * i)) & np.uint64(255) for i in range(8)]
    return [octet.astype(np.float32) / np.float32(255) for octet in octets]


_Plane = Any  # Float32Array: numpy's types lose single precision where a Python number takes part
_Silhouette = Callable[[_Plane, _Plane], _Plane]


def _box(p: _Plane, q: _Plane) -> _Plane:
    return np.maximum(np.abs(p), np.abs(q))


def _plus(p: _Plane, q: _Plane) -> _Plane:
    p, q = np.abs(p), np.abs(q)
    return np.minimum(np.maximum(3 * p, q), np.maximum(p, 3 * q))


def _crescent(p: _Plane, q: _Plane) -> _Plane:
    return np.maximum(p * p + q * q, 2 - ((p - 0.4) * (p - 0.4) + q * q) * 2.2)


def _star(p: _Plane, q: _Plane) -> _Plane:
    p, q = np.abs(p), np.abs(q)
    return p + q + 5 * p * q


def _hourglass(p: _Plane, q: _Plane) -> _Plane:
    q = np.abs(q)
    return np.maximum(q, np.abs(p) - q + 0.85)


def _dots(p: _Plane, q: _Plane) -> _Plane:
    p, q = np.abs(p) - 0.55, np.abs(q) - 0.55
    return (p * p + q * q) * 6


def _pair(p: _Plane, q: _Plane) -> _Plane:
    p = np.abs(p) - 0.55
    return (p * p + q * q * 0.3) * 6


def _target(p: _Plane, q: _Plane) -> _Plane:
    square = p * p + q * q
    return np.minimum(np.abs(square - 0.75) * 4, square * 8)


# Label -> its colour, and its silhouette: d(p, q) < 1 inside; p, q in units of the mark's radius.
_MARKS: dict[str, tuple[tuple[int, int, int], _Silhouette]] = {
    "animal": ((145, 60, 215), _crescent),
    "art": ((235, 50, 205), lambda p, q: np.abs(_box(p, q) - 0.7) * 3.3),
    "celebration": ((205, 140, 85), _dots),
    "equipment": ((60, 105, 215), _plus),
    "fire": ((255, 80, 10), lambda p, q: np.maximum(p * p + q * q, 0.7 - 3 * q)),
    "food": ((250, 180, 40), lambda p, q: p * p + q * q),
    "games": ((120, 75, 35), lambda p, q: _plus((p + q) * 0.75, (p - q) * 0.75)),
    "interior_room": ((255, 150, 195), lambda p, q: np.maximum(_box(p, q), 1 + 3 * np.minimum(p, q))),
    "light": ((255, 250, 130), _star),
    "liquid": ((40, 215, 230), lambda p, q: np.abs(p * p + q * q - 0.62) * 2.6),
    "material": ((55, 50, 45), lambda p, q: np.abs(p) + np.abs(q)),
    "music": ((20, 20, 110), _pair),
    "outdoor": ((240, 245, 255), lambda p, q: np.maximum(np.abs(p), 2.6 * np.abs(q))),
    "plant": ((45, 165, 55), lambda p, q: np.maximum(1.25 * q, 1.6 * np.abs(p) - 0.8 * q + 0.2)),
    "recreation": ((170, 240, 40), _hourglass),
    "religion": ((225, 205, 150), _target),
    "structure": ((185, 40, 50), lambda p, q: _box(p, q) * 1.15),
}
COARSE_LABELS = tuple(sorted(_MARKS))
"""FLAIR's 17 coarse labels, alphabetical."""
_COLOURS = np.array([_MARKS[name][0] for name in COARSE_LABELS], np.float32)
_SHAPES = [_MARKS[name][1] for name in COARSE_LABELS]


@dataclass(frozen=True)
class Scene:
    """What to draw: N images and their M marks, sorted by image. Keys are hashes that fix all randomness."""

    image_keys: Keys  # [N]
    user_keys: Keys  # [N]
    mark_image: IntArray  # [M]: which image a mark is on
    mark_coarse: IntArray  # [M]: its coarse label, a column of COARSE_LABELS
    mark_fine: Keys  # [M]: a hash of its fine label's name

    def part(self, start: int, stop: int) -> Scene:
        """Images ``start`` to ``stop`` and their marks."""
        low, high = np.searchsorted(self.mark_image, [start, stop])
        return Scene(
            self.image_keys[start:stop],
            self.user_keys[start:stop],
            self.mark_image[low:high] - start,
            self.mark_coarse[low:high],
            self.mark_fine[low:high],
        )


def draw(scene: Scene, size: int, difficulty: float = 1.0) -> ByteArray:
    """The images, ``[N, S, S, 3]`` uint8 RGB.

    ``difficulty`` scales what hides the marks: specks, grain, and the range of exposures.
    """
    count, step = len(scene.image_keys), max(1, _CHUNK_PIXELS // (size * size))
    out = np.empty((count, size, size, 3), np.uint8)
    for start in range(0, count, step):
        stop = min(start + step, count)
        out[start:stop] = _draw_chunk(scene.part(start, stop), size, difficulty)
    return out


def _draw_chunk(scene: Scene, size: int, difficulty: float) -> ByteArray:
    colour = _background(scene, size)  # [N, 3, S, S]: sum of weight * colour
    weight = np.full((len(scene.image_keys), size, size), _BACKGROUND, np.float32)
    colour *= _BACKGROUND
    number = np.arange(len(scene.mark_image)) - np.searchsorted(scene.mark_image, scene.mark_image)
    opacity, lit, rgb = _marks(scene, number, size)
    for layer in range(int(number.max(initial=-1)) + 1):  # the order of summing is an image's own
        chosen = np.flatnonzero(number == layer)
        rows, shine = scene.mark_image[chosen], lit[chosen]
        weight[rows] += opacity[chosen]
        for channel in range(3):
            colour[rows, channel] += shine * rgb[chosen, channel, None, None]
    colour /= weight[:, None]
    _confetti(scene, colour, size, round(_SPECKS * difficulty))
    return _photograph(scene, colour, size, np.float32(difficulty))


def outlines(scene: Scene, size: int) -> ByteArray:
    """The masks of `draw`'s images, ``[N, S, S]``: 0, and 1 + a mark's coarse label where it shows most."""
    marks = shown(scene, size)
    return np.where(marks < 0, 0, (scene.mark_coarse + 1).astype(np.uint8)[marks])


def shown(scene: Scene, size: int) -> IntArray:
    """Which of the M marks shows most at each pixel of `draw`'s images, ``[N, S, S]``; -1: none.

    A mark shows most where its opacity is greater than the background's and that of every other mark.
    Confetti counts as what is below it.
    """
    count, step = len(scene.image_keys), max(1, _CHUNK_PIXELS // (size * size))
    out = np.full((count, size, size), -1, np.int64)
    for start in range(0, count, step):
        part = scene.part(start, min(start + step, count))
        first = int(np.searchsorted(scene.mark_image, start))
        number = np.arange(len(part.mark_image)) - np.searchsorted(part.mark_image, part.mark_image)
        opacity, _, _ = _marks(part, number, size)
        most = np.full((len(part.image_keys), size, size), _BACKGROUND, np.float32)
        for layer in range(int(number.max(initial=-1)) + 1):
            chosen = np.flatnonzero(number == layer)
            rows = part.mark_image[chosen]
            shows = opacity[chosen] > most[rows]
            out[start + rows] = np.where(shows, (first + chosen)[:, None, None], out[start + rows])
            most[rows] = np.maximum(most[rows], opacity[chosen])
    return out


def _wave(phase: Float32Array) -> Float32Array:
    """A triangle wave of period 1 between 0 and 1; overwrites its argument."""
    phase -= np.floor(phase)
    phase -= np.float32(0.5)
    np.abs(phase, out=phase)
    phase *= np.float32(2)
    return phase


def _background(scene: Scene, size: int) -> Float32Array:
    """Two colours of the user's, mixed by a slow wave whose direction is the image's, ``[N, 3, S, S]``."""
    first = _shares(keyed(0, "first colour", scene.user_keys))
    second = _shares(keyed(0, "second colour", scene.user_keys))
    shares = _shares(keyed(0, "background", scene.image_keys))
    at = (np.arange(size, dtype=np.float32) + np.float32(0.5)) / np.float32(size)
    across = (shares[0] * 3 - 1.5)[:, None] * at + shares[1][:, None]
    down = (shares[2] * 3 - 1.5)[:, None] * at
    mix = _wave(across[:, None, :] + down[:, :, None])
    out = np.empty((len(mix), 3, size, size), np.float32)
    for channel in range(3):
        start = 50 + 110 * first[channel] + 50 * shares[3 + channel]
        reach = 110 * second[channel] - 55
        out[:, channel] = mix * reach[:, None, None] + start[:, None, None]
    return out


def _marks(scene: Scene, number: IntArray, size: int) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Opacity ``[M, S, S]``, opacity times brightness ``[M, S, S]`` and colour ``[M, 3]`` of every mark."""
    order = np.argsort(scene.mark_coarse, kind="stable")  # marks of a shape lie together while they are drawn
    image, coarse, number = scene.mark_image[order], scene.mark_coarse[order], number[order]
    crowd = np.bincount(scene.mark_image, minlength=len(scene.image_keys))[image].astype(np.float32)
    shift = _shares(keyed(0, "places", scene.image_keys))
    draws = _shares(keyed(0, "mark", scene.image_keys[image], number))
    fine = _shares(scene.mark_fine[order])
    # Places follow the plane-filling R2 sequence from a start of the image's own, so that marks spread out.
    steps = (number.astype(np.float32)[:, None] + 1) * np.array([0.7548777, 0.5698403], np.float32)
    place = steps + np.stack([shift[0][image], shift[1][image]], 1) + 0.15 * np.stack([draws[0], draws[1]], 1)
    place = np.float32(0.17) + np.float32(0.66) * (place - np.floor(place))
    radius = (0.22 + 0.12 * draws[2]) * np.minimum(1, np.sqrt(3 / np.maximum(crowd, 1)))
    at = (np.arange(size, dtype=np.float32) + np.float32(0.5)) / np.float32(size)
    dx, dy = ((at - place[:, i, None]) / radius[:, None] for i in (0, 1))
    turn = (draws[3] - np.float32(0.5)) * np.float32(0.35)  # tangent of half the angle: up to 20 degrees
    cos, sin = ((1 - turn * turn) / (1 + turn * turn))[:, None], (2 * turn / (1 + turn * turn))[:, None]
    p = (cos * dx)[:, None, :] + (sin * dy)[:, :, None]
    q = (cos * dy)[:, :, None] - (sin * dx)[:, None, :]
    opacity = np.empty_like(p)
    bounds = np.searchsorted(coarse, np.arange(len(_SHAPES) + 1))
    for shape, low, high in zip(_SHAPES, bounds, bounds[1:]):
        if low < high:
            opacity[low:high] = shape(p[low:high], q[low:high])
    opacity = np.clip((1 - opacity) * np.float32(4), 0, 1)
    opacity *= (np.float32(0.5) + np.float32(2.5) * draws[4] * draws[4])[:, None, None]
    p *= (0.25 + 1.5 * fine[0])[:, None, None]
    q *= (0.25 + 1.5 * fine[1])[:, None, None]
    p += q
    p += draws[5][:, None, None]
    lit = _wave(p)
    lit *= (0.3 + 0.4 * fine[2])[:, None, None]
    lit += (1 - (0.3 + 0.4 * fine[2]) * np.float32(0.7))[:, None, None]
    lit *= opacity
    rgb = _COLOURS[coarse] * (0.85 + 0.3 * np.stack(fine[3:6], 1)) * (0.8 + 0.3 * draws[6][:, None])
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return opacity[back], lit[back], rgb[back]


def _confetti(scene: Scene, colour: Float32Array, size: int, specks: int) -> None:
    """Specks in the colours of any labels, a sixteenth of the side wide: one pixel alone tells little."""
    draws, number = keyed(0, "confetti", scene.image_keys[:, None]), np.arange(specks, dtype=np.uint64)
    cell = ((draws >> np.uint64(8)) + number * (draws | np.uint64(1))) & np.uint64(255)  # no cell comes twice
    shares = _shares(keyed(0, "speck", scene.image_keys[:, None], number))
    rgb = _COLOURS[np.minimum(shares[0] * len(_COLOURS), len(_COLOURS) - 1).astype(np.int64)]
    rgb *= (0.75 + 0.4 * shares[1])[..., None]
    side = np.arange(max(1, size // 16))
    down = ((cell >> np.uint64(4)).astype(np.int64) * size // 16)[..., None] + side
    across = ((cell & np.uint64(15)).astype(np.int64) * size // 16)[..., None] + side
    image = np.arange(len(colour))[:, None, None, None]
    for channel in range(3):
        colour[image, channel, down[..., :, None], across[..., None, :]] = rgb[..., channel, None, None]


def _photograph(scene: Scene, colour: Float32Array, size: int, difficulty: np.float32) -> ByteArray:
    """The user's camera: a cast and a noise level; the image's exposure and contrast; then bytes."""
    camera = _shares(keyed(0, "camera", scene.user_keys))
    shares = _shares(keyed(0, "exposure", scene.image_keys))
    contrast = 1 - (1 - (0.65 + 0.4 * shares[0])) * difficulty
    lift = (60 * shares[1] - 30) * difficulty + 64 * (1 - contrast)
    grain = (30 + 60 * camera[3]) * difficulty / np.float32(1023)  # full width of the uniform noise
    start = (keyed(0, "noise", scene.image_keys) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    noise = start[:, None] + np.arange(size * size, dtype=np.uint32) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # murmur3's 32-bit finaliser
        noise ^= noise >> np.uint32(shift)
        noise *= np.uint32(factor)
    noise ^= noise >> np.uint32(16)
    noise = noise.reshape(-1, size, size)
    out = np.empty((len(colour), size, size, 3), np.uint8)
    for channel in range(3):
        plane = ((noise >> np.uint32(10 * channel)) & np.uint32(1023)).astype(np.float32)
        plane *= grain[:, None, None]
        plane += colour[:, channel] * (contrast * (0.8 + 0.35 * camera[channel]))[:, None, None]
        plane += (lift - grain * np.float32(511))[:, None, None]
        out[..., channel] = np.clip(plane, 0, 255)
    return out
