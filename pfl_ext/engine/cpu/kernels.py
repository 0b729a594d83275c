"""The compiled convolutions and norms as functions of tensors.

torch's autograd functions (`layers`) call them by ctypes. Registering them by `torch.library.custom_op` with
`register_autograd` was tried: a layer's forward and backward took 0.1 ms longer (0.28 instead of 0.18 ms for
a convolution of one image of 32 x 2 x 2). A step of ResNet-18 at CIFAR's 32 pixels took 1.10 times as long
with 16 images and 1.18 times with 3. A step of `cifar_cnn`, which has one compiled layer, took 0.99 times as
long (AMD EPYC, Zen 3, torch 2.15, CPU time of one thread, the least of 15 in turn).

Shape letters: N images, C channels in, K channels out, H and W positions, G groups.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pfl_ext.engine.cpu.build import Unavailable, compiled
from pfl_ext.engine.cpu.choice import Feature
from pfl_ext.processor import processor

CHANNELS = 32
"""The number of channels must be a multiple of this."""
DEPTHWISE_SIDE, DEPTHWISE_CHANNELS = 5, 16
"""For `CpuKernels.depthwise_weights`: the side of a kernel; its channels must be a multiple of the second."""
PRODUCT, WEIGHTS = 1.4, 900.0
"""Time of Winograd's products with their share of the transforms; and of transforming the weights of a pair
of channels. Both are in units of a plain convolution's products (ResNet-18's layers, see README)."""
SIGNATURES = {  # pointers, whole numbers (threads, half and sizes), others
    "has_halves": (0, 0, 0),
    "conv3x3": (3, 7, 0),
    "conv3x3_inner": (3, 7, 0),
    "conv3x3_backward": (5, 7, 0),
    "convolve": (3, 12, 0),
    "convolve_backward": (5, 12, 0),
    "depthwise_weights": (3, 11, 0),
    "group_norm": (7, 7, 1),
    "group_norm_backward": (11, 7, 0),
    "lanes": (0, 0, 0),
    "lay_images": (2, 7, 0),
    "few_channels": (5, 15, 0),
    "few_channels_backward": (6, 17, 0),
    "pool_outputs": (4, 10, 0),
    "pooled_gradients": (6, 17, 0),
    "crop_images": (4, 8, 0),
    "linear_layer": (4, 6, 0),
    "first_layer": (4, 10, 0),
    "first_gradients": (4, 10, 0),
    "drop_units": (3, 11, 1),
    "linear_gradients": (5, 6, 1),
}


@dataclass(frozen=True)
class Form:
    """A convolution's kernel ``high x wide``, its stride, and the padding above and to the left."""

    high: int
    wide: int
    stride: int
    top: int
    left: int

    def pays(self, n: int, height: int, width: int) -> bool:
        """Whether Winograd's way is faster. Only shapes decide, so that no result depends on a clock."""
        if (self.high, self.wide, self.stride, self.top, self.left) != (3, 3, 1, 1, 1):
            return False
        tiles = n * -(-height // 4) * -(-width // 4)
        return 36 * tiles * PRODUCT + WEIGHTS < 9 * n * height * width

    def pays_without_padding(self, n: int, height: int, width: int) -> bool:
        """`pays` for a convolution without padding: that of a padded one on images 2 pixels smaller."""
        padded = Form(self.high, self.wide, self.stride, 1, 1)
        return (self.top, self.left) == (0, 0) and padded.pays(n, height - 2, width - 2)

    def halves_pay(self, n: int, height: int, width: int) -> bool:
        """Whether half floats are faster, which they are not where the weights are most of the work."""
        down, across = self.output(height, width)
        return self.pays(n, height, width) or n * down * across >= 64

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Number of output positions down and across."""
        return (
            (height + 2 * self.top - self.high) // self.stride + 1,
            (width + 2 * self.left - self.wide) // self.stride + 1,
        )


class CpuKernels:
    """The compiled functions on images in channels-last memory, float32 or bfloat16.

    Convolutions take bfloat16 images only if `has_halves`. Then they multiply IEEE half floats (11 bits),
    scaled so that none overflows. GroupNorm computes in float32 for all types of images. Weights and their
    gradients are float32. Each function uses as many threads as torch has in the calling thread. `checked`
    loads them and compares them with torch's.

    Raises:
        Unavailable: when they cannot be compiled or loaded.
    """

    def __init__(self) -> None:
        self.path = compiled()
        """Where the library lies; its name holds a checksum of the file."""
        try:
            library = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise Unavailable(
                f"{self.path} cannot be loaded ({error}); set XDG_CACHE_HOME to another place"
            ) from error
        self._functions: dict[str, Any] = {}
        for name, (pointers, sizes, numbers) in SIGNATURES.items():
            function = library[name]
            function.argtypes = [
                *[ctypes.c_void_p] * pointers,
                *[ctypes.c_long] * sizes,
                *[ctypes.c_double] * numbers,
            ]
            function.restype = ctypes.c_long
            self._functions[name] = function
        self.has_halves = bool(self._functions["has_halves"]())
        """Whether the processor computes with half floats (AVX512-FP16), according to the compiler."""
        self.lanes = int(self._functions["lanes"]())
        """Numbers that a vector holds."""

    @cached_property
    def feature(self) -> Feature:
        """The processor's feature that decides what computes a layer."""
        flags = processor().split()
        if "amx_bf16" in flags:
            return "AMX"
        if self.has_halves:
            return "AVX512-FP16"
        return "AVX512-BF16" if "avx512_bf16" in flags else "none"

    def __deepcopy__(self, memo: Any) -> CpuKernels:
        return self  # networks that hold it are copied; it is shared

    def call(self, name: str, tensors: Sequence[Tensor | None], *numbers: float) -> None:
        """Call one of the compiled functions. None is passed as a null pointer.

        Raises:
            ValueError: when memory cannot be allocated.
        """
        images = tensors[0]
        assert images is not None
        pointers = (None if t is None else t.data_ptr() for t in tensors)
        half = images.dtype == torch.bfloat16
        if self._functions[name](*pointers, torch.get_num_threads(), half, *numbers):
            raise ValueError("there is no memory to train on: use fewer --runtime.lanes")

    def convolution(self, x: Tensor, weight: Tensor, form: Form) -> Tensor:
        """``[N, C, H, W]`` by ``[K, C, high, wide]`` -> ``[N, K, H', W']``."""
        (n, c, h, w), k = x.shape, len(weight)
        assert c % CHANNELS == k % CHANNELS == 0, "other channels would be read beyond their end"
        if x.dtype != torch.float32 and not form.halves_pay(n, h, w):
            return self.convolution(x.float(), weight, form).to(x.dtype)
        x, weight = last(x), last(weight)
        out = empty((n, k, *form.output(h, w)), x.dtype)
        if form.pays(n, h, w):
            self.call("conv3x3", (x, weight, out), n, h, w, c, k)
        else:
            self.call("convolve", (x, weight, out), n, h, w, c, k, *astuple(form))
        return out

    def convolution_backward(
        self, x: Tensor, e: Tensor, weight: Tensor, form: Form, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of ``x`` and ``weight``, if wanted, from the output's gradient ``e [N, K, H', W']``."""
        (n, c, h, w), k = x.shape, len(weight)
        assert x.dtype == e.dtype
        assert c % CHANNELS == k % CHANNELS == 0, "other channels would be read beyond their end"
        if x.dtype != torch.float32 and not form.halves_pay(n, h, w):
            dx, dw = self.convolution_backward(x.float(), e.float(), weight, form, wanted)
            return None if dx is None else dx.to(x.dtype), dw
        x, e, weight = last(x), last(e), last(weight)
        dx = torch.empty_like(x) if wanted[0] else None
        dw = torch.empty_like(weight) if wanted[1] else None
        if form.pays(n, h, w):
            self.call("conv3x3_backward", (x, e, weight, dx, dw), n, h, w, c, k)
        else:
            self.call("convolve_backward", (x, e, weight, dx, dw), n, h, w, c, k, *astuple(form))
        return dx, dw

    def depthwise_weights(self, x: Tensor, e: Tensor, form: Form) -> Tensor:
        """The weights' float32 gradient ``[C, 1, 5, 5]`` of a convolution that filters each channel alone.

        ``x`` ``[N, C, H, W]`` are its images; ``e`` ``[N, C, H', W']`` is its output's gradient.
        """
        (n, c, h, w), (high, wide) = x.shape, (form.high, form.wide)
        assert c % DEPTHWISE_CHANNELS == 0
        assert high == wide == DEPTHWISE_SIDE
        dw = torch.zeros(high * wide, c)
        self.call("depthwise_weights", (last(x), last(e), dw), n, h, w, c, *astuple(form))
        return dw.t().reshape(c, 1, high, wide)

    def group_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
        relu: bool = False,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like ``torch.native_group_norm``: the output, and mean and reciprocal deviation ``[N, G]``.

        With ``relu`` the output is ``relu(norm)``, or ``relu(norm + added)``.
        """
        assert added is None or added.dtype == x.dtype
        x, added = last(x), None if added is None else last(added)
        (n, c, h, w), out = x.shape, torch.empty_like(x)
        mean, rstd = torch.empty(n, groups), torch.empty(n, groups)
        tensors = (x, added, weight, bias, out, mean, rstd)
        self.call("group_norm", tensors, n, h * w, c, groups, _following(relu, added), eps)
        return out, mean, rstd

    def group_norm_backward(
        self,
        x: Tensor,
        e: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        rstd: Tensor,
        relu: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of ``x``, of each image's scale and shift ``[N, C]``, and of ``added``.

        ``out`` is the output of `group_norm`; it is needed where something was added.
        """
        assert e.dtype == x.dtype
        x, e = last(x), last(e)
        (n, c, h, w), dx = x.shape, torch.empty_like(x)
        scale, shift = torch.empty(n, c), torch.empty(n, c)
        dz = None if out is None else torch.empty_like(x)
        tensors = (x, out, e, weight, bias, mean, rstd, dx, dz, shift, scale)
        self.call("group_norm_backward", tensors, n, h * w, c, mean.shape[1], _following(relu, out))
        return dx, scale, shift, dz


def _following(relu: bool, added: Tensor | None) -> int:
    assert relu or added is None
    return 0 if not relu else 1 if added is None else 2


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in channels-last memory."""
    return torch.empty(tuple(shape), dtype=dtype, memory_format=torch.channels_last)


def is_float32(x: Tensor) -> bool:
    """Whether these are float32 numbers on a CPU, at least one, without autocast."""
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    return plain and not torch.is_autocast_enabled("cpu")


def last(x: Tensor) -> Tensor:
    """The tensor in channels-last memory, detached from autograd."""
    return x.detach().contiguous(memory_format=torch.channels_last)
