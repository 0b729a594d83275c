"""Convolutions and norms for training on a CPU, compiled on the machine where they run.

`cpu` says what they compute. It is compiled once by the machine's C++ compiler (seconds), into the user's
cache folder, under a name that holds the fingerprint of the sources and of the processor.

Shape letters: N images, C channels in, K channels out, H and W positions, G groups.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SOURCES = Path(__file__).parent / "cpu"
THREADED = "-fopenmp"  # without it, where a compiler does not know it, all work is done on one thread
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
CHANNELS = 32
"""Channels must be a multiple of this; those of a convolution's images may also be fewer."""
TOLERANCE = 1e-4  # of a compiled layer beside torch's, when it is loaded
HALF_TOLERANCE = 0.02
PRODUCT, WEIGHTS = 1.4, 900.0
"""Time of Winograd's products with their share of the transforms, in a plain convolution's products; of the
transforms of the weights of a pair of channels, likewise (ResNet-18's layers, see README)."""
SIGNATURES = {  # pointers, whole numbers (threads and sizes), others
    "has_halves": (0, 0, 0),
    "conv3x3": (3, 7, 0),
    "conv3x3_backward": (5, 7, 0),
    "convolve": (3, 12, 0),
    "convolve_backward": (5, 12, 0),
    "thin_convolve": (3, 12, 0),
    "thin_convolve_backward": (3, 12, 0),
    "pool": (3, 10, 0),
    "pool_backward": (3, 10, 0),
    "group_norm": (7, 6, 1),
    "group_norm_backward": (11, 6, 0),
}


class Unavailable(Exception):
    """The reason, in one line."""


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

    def halves_pay(self, n: int, height: int, width: int) -> bool:
        """Whether half floats are the faster ones: in Winograd's way always; in the others, which hold two
        images together, where there are two, with positions enough that weights are not most of the work."""
        down, across = self.output(height, width)
        return self.pays(n, height, width) or (n > 1 and n * down * across >= 64)

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Positions down and across."""
        return (
            (height + 2 * self.top - self.high) // self.stride + 1,
            (width + 2 * self.left - self.wide) // self.stride + 1,
        )


class CpuKernels:
    """The compiled functions on float32 tensors in channels-last memory.

    Each uses as many threads as torch has in the calling thread. ``half``: whether convolutions multiply half
    floats (IEEE's, of 11 bits; tensors stay float32).
    :raises Unavailable: where they cannot be compiled, or compute something else than torch.
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
            function.restype = ctypes.c_long if name == "has_halves" else None
            self._functions[name] = function
        self.half = False
        _check(self)
        if self.has_halves:
            _check(self.halved())

    @cached_property
    def tiles(self) -> bool:
        """Whether the processor multiplies matrices of bfloat16 by tiles (AMX), which torch then uses."""
        return "amx_bf16" in _processor().split()

    @property
    def has_halves(self) -> bool:
        """Whether the processor does arithmetic with half floats (AVX512-FP16)."""
        return bool(self._functions["has_halves"]())

    def halved(self) -> CpuKernels:
        """These with ``half``."""
        made = copy.copy(self)
        made.half = True
        return made

    def at(self, precision: torch.dtype | None) -> tuple[CpuKernels | None, torch.dtype | None]:
        """For training in this type, None being float32: the functions to use, if any, and torch's autocast.

        torch is the faster one in bfloat16 where the processor has tiles for it. Elsewhere these are: with
        half floats, if it has them, and in float32 otherwise.
        """
        if precision is None:
            return self, None
        if self.tiles:
            return None, precision
        return (self.halved() if self.has_halves else self), None

    def __deepcopy__(self, memo: Any) -> CpuKernels:
        return self  # networks that hold it are copied

    def _call(self, name: str, tensors: Sequence[Tensor | None], *numbers: float) -> None:
        pointers = (None if t is None else t.data_ptr() for t in tensors)
        self._functions[name](*pointers, torch.get_num_threads(), *numbers)

    def convolution(self, x: Tensor, weight: Tensor, form: Form) -> Tensor:
        """``[N, C, H, W]`` by ``[K, C, high, wide]`` -> ``[N, K, H', W']``."""
        x, weight = _last(x), _last(weight)
        (n, c, h, w), k = x.shape, len(weight)
        out = torch.empty((n, k, *form.output(h, w)), memory_format=torch.channels_last)
        half = self.half and form.halves_pay(n, h, w)
        if c < CHANNELS:
            self._call("thin_convolve", (x, weight, out), n, h, w, c, k, *astuple(form), half)
        elif form.pays(n, h, w):
            self._call("conv3x3", (x, weight, out), n, h, w, c, k, half)
        else:
            self._call("convolve", (x, weight, out), n, h, w, c, k, *astuple(form), half)
        return out

    def convolution_backward(
        self,
        x: Tensor,
        e: Tensor,
        weight: Tensor,
        form: Form,
        wanted: tuple[bool, bool],
        exact: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """From ``e`` ``[N, K, H', W']``, the output's gradient: those of ``x`` and ``weight``, if wanted.

        ``exact``: in float32, whatever ``half`` says.
        """
        x, e, weight = _last(x), _last(e), _last(weight)
        (n, c, h, w), k = x.shape, len(weight)
        half = self.half and not exact and form.halves_pay(n, h, w)
        if c < CHANNELS:
            return self._thin_backward(x, e, weight, form, wanted, half)
        dx = torch.empty_like(x) if wanted[0] else None
        dw = torch.empty_like(weight) if wanted[1] else None
        if form.pays(n, h, w):
            self._call("conv3x3_backward", (x, e, weight, dx, dw), n, h, w, c, k, half)
        else:
            self._call("convolve_backward", (x, e, weight, dx, dw), n, h, w, c, k, *astuple(form), half)
        return dx, dw

    def _thin_backward(
        self, x: Tensor, e: Tensor, weight: Tensor, form: Form, wanted: tuple[bool, bool], half: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        dx = dw = None
        if wanted[0]:  # by torch: training does not ask for it
            stride, padding = [form.stride] * 2, [form.top, form.left]
            dx = torch.ops.aten.convolution_backward(
                e, x, weight, None, stride, padding, [1, 1], False, [0, 0], 1, [True, False, False]
            )[0]
        if wanted[1]:
            dw, (n, c, h, w) = torch.empty_like(weight), x.shape
            self._call("thin_convolve_backward", (x, e, dw), n, h, w, c, len(weight), *astuple(form), half)
        return dx, dw

    def max_pool(self, x: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """``[N, C, H, W]`` -> ``[N, C, H', W']``: the largest of each window, and bytes: its place there."""
        x = _last(x)
        (n, c, h, w) = x.shape
        out = torch.empty((n, c, *form.output(h, w)), memory_format=torch.channels_last)
        places = torch.empty_like(out, dtype=torch.uint8)
        self._call("pool", (x, out, places), n, h, w, c, *astuple(form))
        return out, places

    def max_pool_backward(self, e: Tensor, places: Tensor, form: Form, size: Sequence[int]) -> Tensor:
        """From ``e`` ``[N, C, H', W']``, the output's gradient: that of ``x``, whose shape is ``size``."""
        n, c, h, w = size
        dx = torch.empty((n, c, h, w), memory_format=torch.channels_last)
        self._call("pool_backward", (_last(e), places, dx), n, h, w, c, *astuple(form))
        return dx

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
        x, added = _last(x), None if added is None else _last(added)
        (n, c, h, w), out = x.shape, torch.empty_like(x)
        mean, rstd = torch.empty(n, groups), torch.empty(n, groups)
        tensors = (x, added, weight, bias, out, mean, rstd)
        self._call("group_norm", tensors, n, h * w, c, groups, _after(relu, added), eps)
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
        x, e = _last(x), _last(e)
        (n, c, h, w), dx = x.shape, torch.empty_like(x)
        scale, shift = torch.empty(n, c), torch.empty(n, c)
        dz = None if out is None else torch.empty_like(x)
        tensors = (x, out, e, weight, bias, mean, rstd, dx, dz, shift, scale)
        self._call("group_norm_backward", tensors, n, h * w, c, mean.shape[1], _after(relu, out))
        return dx, scale, shift, dz


def _after(relu: bool, added: Tensor | None) -> int:
    assert relu or added is None
    return 0 if not relu else 1 if added is None else 2


def _last(x: Tensor) -> Tensor:
    return x.detach().contiguous(memory_format=torch.channels_last)


def compiled() -> Path:
    """The shared library for this machine, compiled unless it is there.

    :raises Unavailable: without a compiler, or if it fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise Unavailable("no C++ compiler (g++ or clang++) was found")
    texts = (path.read_text() for path in sorted(SOURCES.glob("*.*")))
    identity = "\n".join([*texts, compiler, *FLAGS, _processor()])
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flair-on-pfl"
    except RuntimeError as error:
        raise Unavailable("there is no home folder to keep them in; set XDG_CACHE_HOME") from error
    path = folder / f"cpu-kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / path.name
            command = [compiler, *FLAGS, "-shared", "-fPIC", str(SOURCES / "kernels.cpp"), "-o", str(made)]
            done = _run([*command, THREADED])
            if done.returncode:
                done = _run(command)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                raise Unavailable(f"{compiler} failed: {(lines or ['no reason given'])[0][:200]}")
            os.replace(made, path)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{compiler} could not be used ({error})") from error
    return path


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return platform.machine() + "".join(dict.fromkeys(kept))


def _check(kernels: CpuKernels) -> None:
    """A compiler's mistake must not become a result."""
    draw = torch.Generator().manual_seed(1)
    x, e = torch.randn(2, 3, CHANNELS, 14, 28, generator=draw).unbind()
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3, generator=draw)
    scale = weight[0, :, 0, 0].contiguous()
    found: list[Any] = []
    expected: list[Tensor] = []
    for form in (Form(3, 3, 1, 1, 1), Form(3, 3, 2, 1, 1)):
        error = e[:, :, :: form.stride, :: form.stride]
        found += [kernels.convolution(x, weight, form)]
        found += kernels.convolution_backward(x, error, weight, form, (True, True))
        with torch.enable_grad():
            leaves = [t.clone().requires_grad_() for t in (x, weight)]
            y = F.conv2d(leaves[0], leaves[1], stride=form.stride, padding=1)
            expected += [y, *torch.autograd.grad(y, leaves, error)]
    for relu, added in ((False, None), (True, None), (True, torch.cos(x))):
        out, mean, rstd = kernels.group_norm(x, scale, scale, 4, 1e-5, relu, added)
        kept = None if added is None else out
        dx, dscale, dshift, dz = kernels.group_norm_backward(x, e, scale, scale, mean, rstd, relu, kept)
        found += [out, dx, dscale.sum(0), dshift.sum(0), *([] if dz is None else [dz])]
        with torch.enable_grad():
            leaves = [t.clone().requires_grad_() for t in (x, scale, scale)]
            y = F.group_norm(leaves[0], 4, leaves[1], leaves[2])
            if added is not None:
                leaves.append(added.requires_grad_())
                y = y + added
            y = y.relu() if relu else y
            expected += [y, *torch.autograd.grad(y, leaves, e)]
    tolerance = HALF_TOLERANCE if kernels.half else TOLERANCE
    for ours, theirs in zip(found, expected):
        if not (ours - theirs).norm() <= tolerance * theirs.norm():
            raise Unavailable("what the compiler made of them does not compute what torch computes")
