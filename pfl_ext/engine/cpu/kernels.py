"""The compiled convolutions and norms as functions of tensors.

They are called by ctypes within torch's autograd functions (`layers`). Registered instead by
`torch.library.custom_op` with `register_autograd`, a layer's forward and backward cost 0.1 ms more (0.28 for
0.18 ms of a convolution of one image of 32 x 2 x 2). A step of ResNet-18 at CIFAR's 32 pixels then took 1.10
times as long with 16 images and 1.18 times with 3; a step of `cifar_cnn`, which has one compiled layer, 0.99
times (AMD EPYC, Zen 3, torch 2.15, CPU time of one thread, the least of 15 in turn).

Shape letters: N images, C channels in, K channels out, H and W positions, G groups.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_ext.engine.cpu.build import Unavailable, compiled, processor
from pfl_ext.engine.cpu.choice import Feature
from pfl_ext.data.transforms import KEY_BITS

CHANNELS = 32
"""Channels must be a multiple of this."""
FEW_IMAGES = 32
"""Up to which a linear layer is compiled; torch multiplies more of them as fast."""
PRODUCT, WEIGHTS = 1.4, 900.0
"""Time of Winograd's products with their share of the transforms, in a plain convolution's products; of the
transforms of the weights of a pair of channels, likewise (ResNet-18's layers, see README)."""
SIGNATURES = {  # pointers, whole numbers (threads, half and sizes), others
    "has_halves": (0, 0, 0),
    "conv3x3": (3, 7, 0),
    "conv3x3_inner": (3, 7, 0),
    "conv3x3_backward": (5, 7, 0),
    "convolve": (3, 12, 0),
    "convolve_backward": (5, 12, 0),
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
    "linear_gradients": (6, 6, 1),
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
        """Whether Winograd's way is the faster one: of shapes alone, so that no result depends on a clock."""
        if (self.high, self.wide, self.stride, self.top, self.left) != (3, 3, 1, 1, 1):
            return False
        tiles = n * -(-height // 4) * -(-width // 4)
        return 36 * tiles * PRODUCT + WEIGHTS < 9 * n * height * width

    def pays_without_padding(self, n: int, height: int, width: int) -> bool:
        """`pays`, of the same convolution without its padding, which it is here."""
        padded = Form(self.high, self.wide, self.stride, 1, 1)
        return (self.top, self.left) == (0, 0) and padded.pays(n, height - 2, width - 2)

    def halves_pay(self, n: int, height: int, width: int) -> bool:
        """Whether half floats are the faster ones: not where the weights are most of the work."""
        down, across = self.output(height, width)
        return self.pays(n, height, width) or n * down * across >= 64

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Positions down and across."""
        return (
            (height + 2 * self.top - self.high) // self.stride + 1,
            (width + 2 * self.left - self.wide) // self.stride + 1,
        )


class Laid(NamedTuple):
    """What `CpuKernels.few_channels` leaves for its gradients."""

    images: Tensor
    """``[C, H, W, N']``: the N images last, and nothing of meaning up to N', a number of whole vectors; or, where
    outputs are pooled, ``[N, H, W, C]``. Both with their padding."""
    out: Tensor | None = None
    """``[K, H', W', N']``; not needed without ReLU."""
    places: Tensor | None = None
    """``[N, K, H', W']``: of each output which of the four it is that were pooled, or 4 where ReLU lets nothing
    through; uint8. None where nothing was pooled."""


@dataclass
class Room:
    """Memory for the gradient of a large weight, which each step writes to again.

    So it need not be asked for in each step, which would take as long as the products.
    """

    gradient: Tensor
    after: Tensor | None = None
    """Where the weights after a step of gradient descent go: then ``gradient`` is not written to, and ``done`` says
    that the step was made. It may be the weights themselves."""
    rate: float = 0.0
    """Of that step."""
    done: bool = False


@dataclass(frozen=True)
class After:
    """What follows a convolution: ReLU, and the largest of each 2 x 2 positions."""

    relu: bool = False
    pool: bool = False


class CpuKernels:
    """The compiled functions on images in channels-last memory, float32 or bfloat16.

    Convolutions take bfloat16 images only if `has_halves`: then they multiply half floats (IEEE's, of 11
    bits, times scales by which none gets too large). GroupNorm computes in float32, whatever its images are.
    Weights and their gradients are float32. Each uses as many threads as torch has in the calling thread.
    `checked` makes them and compares them with torch's.

    Raises:
        Unavailable: where they cannot be compiled or loaded.
    """

    def __init__(self) -> None:
        path = compiled()
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(
                f"{path} cannot be loaded ({error}); set XDG_CACHE_HOME to another place"
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
        """Whether the processor does arithmetic with half floats (AVX512-FP16), as the compiler knows it."""
        self._lanes = int(self._functions["lanes"]())

    @cached_property
    def feature(self) -> Feature:
        """What of the processor decides who computes a layer."""
        flags = processor().split()
        if "amx_bf16" in flags:
            return "AMX"
        if self.has_halves:
            return "AVX512-FP16"
        return "AVX512-BF16" if "avx512_bf16" in flags else "none"

    def __deepcopy__(self, memo: Any) -> CpuKernels:
        return self  # networks that hold it are copied

    def _call(self, name: str, tensors: Sequence[Tensor | None], *numbers: float) -> None:
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
        x, weight = _last(x), _last(weight)
        out = _empty((n, k, *form.output(h, w)), x.dtype)
        if form.pays(n, h, w):
            self._call("conv3x3", (x, weight, out), n, h, w, c, k)
        else:
            self._call("convolve", (x, weight, out), n, h, w, c, k, *astuple(form))
        return out

    def convolution_backward(
        self, x: Tensor, e: Tensor, weight: Tensor, form: Form, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """From ``e`` ``[N, K, H', W']``, the output's gradient: those of ``x`` and ``weight``, if wanted."""
        (n, c, h, w), k = x.shape, len(weight)
        assert x.dtype == e.dtype
        assert c % CHANNELS == k % CHANNELS == 0, "other channels would be read beyond their end"
        if x.dtype != torch.float32 and not form.halves_pay(n, h, w):
            dx, dw = self.convolution_backward(x.float(), e.float(), weight, form, wanted)
            return None if dx is None else dx.to(x.dtype), dw
        x, e, weight = _last(x), _last(e), _last(weight)
        dx = torch.empty_like(x) if wanted[0] else None
        dw = torch.empty_like(weight) if wanted[1] else None
        if form.pays(n, h, w):
            self._call("conv3x3_backward", (x, e, weight, dx, dw), n, h, w, c, k)
        else:
            self._call("convolve_backward", (x, e, weight, dx, dw), n, h, w, c, k, *astuple(form))
        return dx, dw

    def few_channels(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], after: After
    ) -> tuple[Tensor, Laid]:
        """``[N, C, H, W]`` by ``[K, C, high, wide]`` with stride 1 -> ``[N, K, H', W']``, and what follows.

        Vectors go across images, so that no channels are needed to fill them. Float32.
        """
        images, weight = self.laid(x, *padding), _last(weight)
        c, h, w, n = images.shape
        k, _, high, wide = weight.shape
        shape = [k, h - high + 1, w - wide + 1, n]
        if after.pool:
            shape[1:3] = [side // 2 for side in shape[1:3]]
        out = torch.empty(shape)
        places = torch.empty(shape, dtype=torch.uint8) if after.pool else None
        sizes = (n, len(x), c, h, w, k, high, wide, after.relu, after.pool, *images.stride()[:3])
        self._call("few_channels", (images, weight, bias, out, places), *sizes)
        y = out.permute(3, 0, 1, 2)[: len(x)]
        if places is None:
            return y, Laid(images, out)
        return y, Laid(_padded(x, *padding), None, places.permute(3, 0, 1, 2)[: len(x)])

    def few_channels_backward(
        self,
        e: Tensor,
        weight: Tensor,
        padding: tuple[int, int],
        after: After,
        laid: Laid,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """From ``e`` ``[N, K, H', W']``, the output's: the gradients of ``x``, of weights and of bias.

        ``wanted``: whether that of ``x``, and whether the others.
        """
        if laid.places is not None:
            return self.pooled_backward(e, weight, padding, laid, wanted)
        images, weight, e_laid = laid.images, _last(weight), self.laid(e)
        c, h, w, n = images.shape
        k, _, high, wide = weight.shape
        both = torch.zeros(weight.numel() + k) if wanted[1] else None
        dx = torch.empty_strided(images.shape, images.stride()) if wanted[0] else None
        tensors = (images, e_laid, laid.out, weight, dx, both)
        sizes = (n, len(e), c, h, w, k, high, wide, after.relu)
        steps = (*images.stride()[:3], *e_laid.stride()[:3])
        self._call("few_channels_backward", tensors, *sizes, *steps)
        dw = None if both is None else both[:-k].view(k, high, wide, c).permute(0, 3, 1, 2)
        if dx is not None:
            (top, left), dx = padding, dx.permute(3, 0, 1, 2)[: len(e)]
            dx = dx[:, :, top : h - top, left : w - left]
        return dx, dw, None if both is None else both[-k:]

    def cropped(self, images: Tensor, crops: Tensor, table: Tensor, size: int, reflect: bool) -> Tensor:
        """Crops of exactly ``size`` pixels, as `pfl_ext.data.transforms.cropped` has them.

        uint8 ``[N, H, W, 3]`` and crops ``[N, 6]`` or more -> ``[N, 3, size, size]``, whose values ``table``
        ``[3, 256]`` gives for those of a pixel.
        """
        images, crops = images.contiguous(), crops.float().contiguous()
        n, h, w, _ = images.shape
        out = _empty((n, 3, size, size), torch.float32)
        self._call("crop_images", (images, crops, table, out), n, h, w, size, crops.shape[1], reflect)
        return out

    def first(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], relu: bool
    ) -> tuple[Tensor, Tensor]:
        """As `few_channels` without pooling, channels last, of a multiple of `CHANNELS` out; the padded images."""
        images, weight = _padded(x, *padding), _last(weight)
        (n, h, w, c), (k, _, high, wide) = images.shape, weight.shape
        out = _empty((n, k, h - high + 1, w - wide + 1), torch.float32)
        self._call("first_layer", (images, weight, bias, out), n, h, w, c, k, high, wide, relu)
        return out, images

    def first_backward(
        self, images: Tensor, e: Tensor, out: Tensor, weight: Tensor, relu: bool
    ) -> tuple[Tensor, Tensor]:
        """From ``e``, the gradient of `first`'s output: those of weights and of bias."""
        e, (n, h, w, c), (k, _, high, wide) = _last(e), images.shape, weight.shape
        both = torch.zeros(weight.numel() + k)
        self._call("first_gradients", (images, e, out, both), n, h, w, c, k, high, wide, relu)
        return both[:-k].view(k, high, wide, c).permute(0, 3, 1, 2), both[-k:]

    def pooled(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], relu: bool
    ) -> tuple[Tensor, Laid]:
        """As `few_channels` where outputs are pooled, of any number of channels in and at least 16 out."""
        y = self._plain(x, weight, padding)
        n, k, down, across = y.shape
        out = _empty((n, k, down // 2, across // 2), torch.float32)
        places = torch.empty_like(out, dtype=torch.uint8)
        image, _, row, column = y.stride()
        sizes = (n, down // 2, across // 2, k, relu, image, row, column)
        self._call("pool_outputs", (y, bias, out, places), *sizes)
        return out, Laid(_padded(x, *padding), None, places)

    def _plain(self, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
        """The convolution without what follows it, channels last."""
        (n, c, h, w), (k, _, *kernel) = x.shape, weight.shape
        form = Form(3, 3, 1, *padding)
        if c % CHANNELS == k % CHANNELS == 0 and kernel == [3, 3] and form.pays(n, h, w):
            return self.convolution(x, weight, form)
        if c % CHANNELS == k % CHANNELS == 0 and kernel == [3, 3] and form.pays_without_padding(n, h, w):
            x, out = _last(x), _empty((n, k, h - 2, w - 2), torch.float32)
            self._call("conv3x3_inner", (x, _last(weight), out), n, h, w, c, k)
            return out
        return F.conv2d(_last(x), _last(weight), padding=padding).contiguous(memory_format=torch.channels_last)

    def pooled_backward(
        self,
        e: Tensor,
        weight: Tensor,
        padding: tuple[int, int],
        laid: Laid,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`few_channels_backward` where outputs were pooled, of any number of channels."""
        images, places, weight, e = laid.images, laid.places, _last(weight), e.detach()
        assert places is not None
        (n, h, w, c), (k, _, high, wide) = images.shape, weight.shape
        both = torch.zeros(weight.numel() + k) if wanted[1] else None
        dx = torch.empty_like(images) if wanted[0] else None
        sizes = (n, h, w, c, k, high, wide, *e.stride(), *places.stride())
        self._call("pooled_gradients", (images, e, places, weight, dx, both), *sizes)
        if dx is not None:
            (top, left), dx = padding, dx.permute(0, 3, 1, 2)
            dx = dx[:, :, top : h - top, left : w - left]
        if both is None:
            return dx, None, None
        return dx, both[:-k].view(k, high, wide, c).permute(0, 3, 1, 2), both[-k:]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        """``[N, C]`` by ``[K, C]`` -> ``[N, K]``, and ReLU if there is one."""
        x, weight = x.detach().contiguous(), weight.detach().contiguous()
        if len(x) > FEW_IMAGES:
            out = x @ weight.t() if bias is None else torch.addmm(bias.detach(), x, weight.t())
            return out.relu_() if relu else out
        out = torch.empty(len(x), len(weight))
        self._call("linear_layer", (x, weight, bias, out), len(x), x.shape[1], len(weight), relu)
        return out

    def linear_backward(
        self,
        x: Tensor,
        e: Tensor,
        weight: Tensor,
        out: Tensor | None,
        wanted: Sequence[bool],
        room: Room | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """From ``e`` ``[N, K]``, the output's: the gradients of ``x``, of weights and of bias, if wanted.

        Args:
            x: ``[N, C]``.
            e: see above.
            weight: ``[K, C]``.
            out: what `linear` gave, if it had a ReLU.
            wanted: of the three.
            room: where the gradient of the weights, or the weights after a step, are written to.
        """
        x, weight = x.detach().contiguous(), weight.detach().contiguous()
        (n, c), k = x.shape, len(weight)
        e = e.detach().contiguous()
        if out is not None:
            e = torch.ops.aten.threshold_backward(e, out, 0)
        dx = torch.empty_like(x) if wanted[0] else None
        dw = (torch.empty_like(weight) if room is None else room.gradient) if wanted[1] else None
        db = torch.empty(k) if wanted[2] else None
        if n <= FEW_IMAGES:
            step = room is not None and room.after is not None and dw is not None
            tensors = (x, e, weight, dx, room.after if step else dw, db)
            self._call("linear_gradients", tensors, n, c, k, step, room.rate if step else 0.0)
            if step:
                room.done = True
            return dx, dw, db
        if dx is not None:
            torch.mm(e, weight, out=dx)
        if dw is not None:
            torch.mm(e.t(), x, out=dw)
        return dx, dw, e.sum(0) if wanted[2] else None

    def dropped(self, x: Tensor, keys: Tensor, p: float, number: int, wide: int) -> Tensor:
        """As `pfl_ext.models.dropout.KeyedDropout` with these properties, of images with these keys."""
        x, n, units, places = x.detach(), len(x), x.shape[1], x[0, 0].numel()
        last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        if not last:
            x = x.contiguous()
        if last and wide:  # as the next layer likes it
            sizes, out = (places, units, units, 1), torch.empty_like(x)
        else:  # which after single elements is a linear one
            sizes, out = (units, places, *((1, units) if last else (places, 1))), torch.empty(x.shape)
        of_units = (places, 1, 0)[wide]
        of_places = (1, 0, 0)[wide]
        of = (of_places, of_units) if last and wide else (of_units, of_places)
        least, factor = round(p * (1 << KEY_BITS)), 0.0 if p == 1 else 1 / (1 - p)
        self._call("drop_units", (x, keys, out), n, *sizes, number, least, *of, factor)
        return out

    def laid(self, x: Tensor, top: int = 0, left: int = 0) -> Tensor:
        """``[N, C, H, W]`` -> ``[C, H + 2 top, W + 2 left, N']`` of `Laid`, as it is where it is laid so."""
        x = x.detach()
        n, c, h, w = x.shape
        most = -(-n // self._lanes) * self._lanes
        if not (top or left):
            room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
            if x.stride() == (1, h * w * most, w * most, most) and room >= c * h * w * most:
                return x.as_strided((c, h, w, most), (h * w * most, w * most, most, 1))
            if x.is_contiguous():
                out = torch.empty(c, h, w, most)
                self._call("lay_images", (x, out), n, most, 1, c * h * w, 0)
                return out
        x, wide = _last(x), w + 2 * left
        out = (torch.zeros if top or left else torch.empty)(h + 2 * top, wide, c, most)
        self._call("lay_images", (x, out[top:, left:]), n, most, h, w * c, wide * c)
        return out.permute(2, 0, 1, 3)

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
        """As ``torch.native_group_norm``: the output, mean and reciprocal deviation ``[N, G]``.

        With ``relu`` the output is ``relu(norm)``, or ``relu(norm + added)``.
        """
        assert added is None or added.dtype == x.dtype
        x, added = _last(x), None if added is None else _last(added)
        (n, c, h, w), out = x.shape, torch.empty_like(x)
        mean, rstd = torch.empty(n, groups), torch.empty(n, groups)
        tensors = (x, added, weight, bias, out, mean, rstd)
        self._call("group_norm", tensors, n, h * w, c, groups, _following(relu, added), eps)
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
        """The gradient of ``x``; each image's of the scale and of the shift ``[N, C]``; that of ``added``.

        ``out`` is `group_norm`'s, and given where something was added.
        """
        assert e.dtype == x.dtype
        x, e = _last(x), _last(e)
        (n, c, h, w), dx = x.shape, torch.empty_like(x)
        scale, shift = torch.empty(n, c), torch.empty(n, c)
        dz = None if out is None else torch.empty_like(x)
        tensors = (x, out, e, weight, bias, mean, rstd, dx, dz, shift, scale)
        self._call("group_norm_backward", tensors, n, h * w, c, mean.shape[1], _following(relu, out))
        return dx, scale, shift, dz


def _following(relu: bool, added: Tensor | None) -> int:
    assert relu or added is None
    return 0 if not relu else 1 if added is None else 2


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, memory_format=torch.channels_last)


def _padded(x: Tensor, top: int, left: int) -> Tensor:
    """``[N, C, H, W]`` -> ``[N, H + 2 top, W + 2 left, C]``."""
    x = x.detach().permute(0, 2, 3, 1)
    if not (top or left):
        return x.contiguous()
    n, h, w, c = x.shape
    out = torch.zeros(n, h + 2 * top, w + 2 * left, c)
    out[:, top : top + h, left : left + w] = x
    return out


def _last(x: Tensor) -> Tensor:
    return x.detach().contiguous(memory_format=torch.channels_last)
