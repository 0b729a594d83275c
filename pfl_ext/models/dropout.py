"""Dropout that is decided by a key of each image.

torch's dropout draws from a global generator. So what it drops depends on the device, on how users are
divided among workers, and on where a run was interrupted. Here each image of a batch has a key, which is
drawn with its crop (`pfl_ext.data.transforms.draw_keys`) and is a function of (seed, round, user, step). A
hash of the image's key, the layer's number and the unit's number decides what a layer drops. It is the same
in any batch, in the engine and in pfl's loop, and on any device, since integers do not round.

Srivastava et al. 2014 (dropout; units that stay are scaled by 1 / (1 - p)), Tompson et al. 2015 (whole
channels), Huang et al. 2016 (stochastic depth).

Shape letters: B images of a batch, C channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from pfl_ext.data.transforms import CROP_COLUMNS, KEY_BITS, KEY_COLUMNS

_KEYS: ContextVar[Tensor | None] = ContextVar("the keys of the images in a forward pass", default=None)
_ELEMENTS = (nn.Dropout,)
_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPPING = (nn.modules.dropout._DropoutNd, StochasticDepth)
"""The types of modules that `KeyedDropout` replaces, or that are left out."""
OF_ANCHORS, OF_PROPOSALS, OF_CUTOUT, OF_COLOR_JITTER, OF_RANDOM_ERASING, OF_RAND_AUGMENT, OF_NOISE = (
    (1 << 20) + number for number in range(7)
)
"""Numbers of draws for other things than dropout (`drawn`); a layer's number is below all of them."""
_LEFT_OUT = "dropout_left_out"
"""Attribute of a layer of attention whose own dropout is left out."""
# David Stafford's "Mix13" constants of the SplitMix64 finaliser, and its increment, as signed integers
_FIRST, _SECOND, _STEP = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB


class LeftOut(nn.Identity):
    """In the place of a layer of dropout that a run leaves out."""


def left_out(layer: nn.Module) -> nn.Identity:
    """The replacement of a layer of `DROPPING` that a run leaves out; nothing is left out where p is 0."""
    return LeftOut() if layer.p else nn.Identity()


def leave_out_of_attention(network: nn.Module) -> None:
    """Set the dropout of each `nn.MultiheadAttention` to 0, which it draws from the global generator."""
    for layer in network.modules():
        if isinstance(layer, nn.MultiheadAttention) and layer.dropout:
            layer.dropout = 0.0
            vars(layer)[_LEFT_OUT] = True


def count_left_out(network: nn.Module) -> int:
    """The number of layers whose dropout is left out."""
    return sum(isinstance(layer, LeftOut) or hasattr(layer, _LEFT_OUT) for layer in network.modules())


@contextlib.contextmanager
def dropping(crops: Tensor | None) -> Iterator[None]:
    """In this context and thread, layers drop units by the keys in these crops; without keys, none.

    Args:
        crops: ``[B, 6]`` or, with keys, ``[B, 9]`` or more, of the images that go through the network in the
            context.
    """
    token = _KEYS.set(keys_in(crops))
    try:
        yield
    finally:
        _KEYS.reset(token)


def keys_in(crops: Tensor | None) -> Tensor | None:
    """The keys in crops, int64 ``[B]``; None if there are none. Arguments as for `dropping`."""
    if crops is None or crops.shape[1] == CROP_COLUMNS:
        return None
    high, low = crops[:, CROP_COLUMNS : CROP_COLUMNS + KEY_COLUMNS].to(torch.int64).unbind(1)
    return high << KEY_BITS | low


def without_keys(crops: Tensor | None) -> Tensor | None:
    """The crops without keys, so that nothing is dropped, hidden or mixed. Arguments as for `dropping`."""
    return None if crops is None else crops[:, :CROP_COLUMNS]


def keys_of_images() -> Tensor | None:
    """The keys, int64 ``[B]``, of the images that go through the network at present; None: no dropout."""
    return _KEYS.get()


def draws_of_images(number: int, count: int, images: Tensor) -> Tensor:
    """Draws ``[B, count]`` in 0..1, multiples of 2**-24, for the images in the network at present.

    They are functions of each image's key (without keys, of the key 0) and of the arguments.

    Args:
        number: the number of the stream; those of dropout's layers are below 2**20.
        count: number of draws for an image.
        images: ``[B, ...]``, of which only the number and the device are read.
    """
    keys = keys_of_images()
    if keys is None:
        keys = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    return drawn(keys, number, count).float() / (1 << KEY_BITS)


def drawn(keys: Tensor, number: int, count: int) -> Tensor:
    """Whole numbers below 2**24, int64 ``[B, count]``, from keys ``[B]``; see `draws_of_images`."""
    return _shifted(_words(keys, number, count), 64 - KEY_BITS)


def drawn_twice(keys: Tensor, number: int, count: int) -> tuple[Tensor, Tensor]:
    """Two independent sets of draws as those of `draws_of_images`, ``[B, count]``, from keys ``[B]``."""
    words = _words(keys, number, count)
    first, second = (_shifted(words, 64 - KEY_BITS), words & (1 << KEY_BITS) - 1)
    return first.float() / (1 << KEY_BITS), second.float() / (1 << KEY_BITS)


def _words(keys: Tensor, number: int, count: int) -> Tensor:
    """64 bits for each of ``count`` units of each key, int64 ``[B, count]``."""
    units = torch.arange(count, device=keys.device)
    streams = mixed(mixed(keys) + number)
    return mixed(streams[:, None] + units * _STEP)


def mixed(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): int64 to int64, one to one."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z = (z ^ _shifted(z, shift)) * factor
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Bits shifted to the right, with zeros from the left."""
    return z >> by & (1 << 64 - by) - 1


def check_rows(keys: Tensor, x: Tensor) -> None:
    """Refuse a network whose dropout gets other rows than one for each image.

    Raises:
        ValueError: one line with the numbers.
    """
    if len(keys) != len(x):
        raise ValueError(
            f"dropout gets {len(x)} rows for {len(keys)} images, as positions are folded into the batch: "
            "drop where each image has one row, or set model.dropout to false"
        )


class KeyedDropout(nn.Module):
    """Drops with probability p by the keys of `dropping`; without keys, as in evaluation, it drops nothing.

    Args:
        p: from 0 to 1.
        number: the layer's number in its network.
        wide: what is dropped of an image ``[C, ...]``. 0: single elements; 1: channels; 2: all or nothing.
    """

    def __init__(self, p: float, number: int, wide: int = 0) -> None:
        super().__init__()
        self.p, self.number, self.wide = p, number, wide

    def forward(self, x: Tensor) -> Tensor:
        """``[B, ...]`` -> the same shape."""
        keys = keys_of_images()
        if keys is None or not self.p:
            return x
        check_rows(keys, x)
        own = {0: x.shape[1:], 1: x.shape[1:2], 2: x.shape[1:1]}[self.wide]
        kept = self._kept(keys, own).view(-1, *own, *[1] * (x.ndim - 1 - len(own)))
        return x * kept.to(x.dtype) * (0.0 if self.p == 1 else 1 / (1 - self.p))

    def _kept(self, keys: Tensor, shape: torch.Size) -> Tensor:
        """Whether each unit of each image stays, ``[B, units]``."""
        return drawn(keys, self.number, shape.numel()) >= round(self.p * (1 << KEY_BITS))

    def extra_repr(self) -> str:
        """The layer's settings, as torch's layers print them."""
        return f"p={self.p}, number={self.number}, wide={self.wide}"


def keyed(layer: nn.Module, number: int) -> KeyedDropout:
    """The replacement of a layer of `DROPPING`.

    Raises:
        ValueError: for a kind that is not supported, such as dropout that keeps mean and variance.
    """
    if isinstance(layer, StochasticDepth) and layer.mode == "row":
        return KeyedDropout(layer.p, number, 2)
    for wide, kinds in enumerate((_ELEMENTS, _CHANNELS)):
        if type(layer) in kinds:
            return KeyedDropout(float(layer.p), number, wide)  # type: ignore[arg-type]
    raise ValueError(f"model.dropout is true, and the network has {layer}, which is not known here")
