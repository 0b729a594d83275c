"""Convolutions and norms for training on a CPU, compiled on the machine where they run.

`cpu` says what they compute. It is compiled once by the machine's C++ compiler (seconds), into the user's
cache folder, under a name that holds the fingerprints of what it was made of (sources, compiler and its
version, processor) and of itself: a file that was damaged since is not loaded but made again.

Shape letters: N images, C channels in, K channels out, H and W positions, G groups.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_ext.engine.cpu.choice import Feature

SOURCES = Path(__file__).parent
THREADED = "-fopenmp"  # without it, where a compiler does not know it, all work is done on one thread
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
CHANNELS = 32
"""Channels must be a multiple of this; those of a convolution's images may also be fewer."""
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.02
"""Of a compiled layer beside torch's when it is loaded, on float32 and on bfloat16 images."""
PRODUCT, WEIGHTS = 1.4, 900.0
"""Time of Winograd's products with their share of the transforms, in a plain convolution's products; of the
transforms of the weights of a pair of channels, likewise (ResNet-18's layers, see README)."""
SIGNATURES = {  # pointers, whole numbers (threads, half and sizes), others
    "has_halves": (0, 0, 0),
    "conv3x3": (3, 7, 0),
    "conv3x3_backward": (5, 7, 0),
    "convolve": (3, 12, 0),
    "convolve_backward": (5, 12, 0),
    "group_norm": (7, 7, 1),
    "group_norm_backward": (11, 7, 0),
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
        """Whether half floats are the faster ones: not where the weights are most of the work."""
        down, across = self.output(height, width)
        return self.pays(n, height, width) or n * down * across >= 64

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Positions down and across."""
        return (
            (height + 2 * self.top - self.high) // self.stride + 1,
            (width + 2 * self.left - self.wide) // self.stride + 1,
        )


class CpuKernels:
    """The compiled functions on images in channels-last memory, float32 or bfloat16.

    Convolutions take bfloat16 images only if `has_halves`: then they multiply half floats (IEEE's, of 11
    bits, times scales by which none gets too large). GroupNorm computes in float32, whatever its images are.
    Weights and their gradients are float32. Each uses as many threads as torch has in the calling thread.
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
            function.restype = ctypes.c_long
            self._functions[name] = function
        self.has_halves = bool(self._functions["has_halves"]())
        """Whether the processor does arithmetic with half floats (AVX512-FP16), as the compiler knows it."""
        _check(self, torch.float32, TOLERANCE)
        _check(self, torch.bfloat16, HALF_TOLERANCE)

    @cached_property
    def feature(self) -> Feature:
        """What of the processor decides who computes a layer."""
        flags = _processor().split()
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
        if x.dtype != torch.float32 and not form.halves_pay(n, h, w):
            return self.convolution(x.float(), weight, form).to(x.dtype)
        x, weight = _last(x), _last(weight)
        out = _empty((n, k, *form.output(h, w)), x.dtype)
        if c >= CHANNELS and form.pays(n, h, w):
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
        if x.dtype != torch.float32 and not form.halves_pay(n, h, w):
            dx, dw = self.convolution_backward(x.float(), e.float(), weight, form, wanted)
            return None if dx is None else dx.to(x.dtype), dw
        if c < CHANNELS and wanted[0]:
            raise ValueError(f"the gradient of images with fewer than {CHANNELS} channels")
        x, e, weight = _last(x), _last(e), _last(weight)
        dx = torch.empty_like(x) if wanted[0] else None
        dw = torch.empty_like(weight) if wanted[1] else None
        if c >= CHANNELS and form.pays(n, h, w):
            self._call("conv3x3_backward", (x, e, weight, dx, dw), n, h, w, c, k)
        else:
            self._call("convolve_backward", (x, e, weight, dx, dw), n, h, w, c, k, *astuple(form))
        return dx, dw

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
        assert e.dtype == x.dtype
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


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, memory_format=torch.channels_last)


def _last(x: Tensor) -> Tensor:
    return x.detach().contiguous(memory_format=torch.channels_last)


def compiled() -> Path:
    """The shared library for this machine, compiled unless it is there.

    :raises Unavailable: without a compiler, or if it fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise Unavailable("no C++ compiler (g++ or clang++) was found")
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flair-on-pfl"
    except RuntimeError as error:
        raise Unavailable("there is no home folder to keep them in; set XDG_CACHE_HOME") from error
    try:
        texts = (path.read_text() for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]))
        version = _run([compiler, "--version"]).stdout
        identity = "\n".join([*texts, compiler, version, *FLAGS, _processor()])
        name = f"cpu-kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        for path in sorted(folder.glob(f"{name}-*.so")):
            if path.stem == f"{name}-{_checksum(path)}":
                return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            print("compiling layers for this processor: some ten seconds, once", file=sys.stderr, flush=True)
            made = Path(place) / "made.so"
            command = [compiler, *FLAGS, "-shared", "-fPIC", str(SOURCES / "kernels.cpp"), "-o", str(made)]
            done = _run([*command, THREADED])
            if done.returncode:
                done = _run(command)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                raise Unavailable(f"{compiler} failed: {(lines or ['no reason given'])[0][:200]}")
            path = folder / f"{name}-{_checksum(made)}.so"
            os.replace(made, path)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{compiler} could not be used ({error})") from error
    return path


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


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


def _check(kernels: CpuKernels, dtype: torch.dtype, tolerance: float) -> None:
    """A compiler's mistake must not become a result."""
    draw = torch.Generator().manual_seed(1)
    x, e = torch.randn(2, 3, CHANNELS, 14, 28, generator=draw).to(dtype).unbind()
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3, generator=draw)
    scale = weight[0, :, 0, 0].contiguous()
    found: list[Any] = []
    expected: list[Tensor] = []
    forms = (
        (Form(3, 3, 1, 1, 1), CHANNELS),
        (Form(3, 3, 2, 1, 1), CHANNELS),
        (Form(3, 3, 2, 1, 1), 3),
    )
    for form, c in forms if dtype == torch.float32 or kernels.has_halves else ():
        error, images, own = e[:, :, :: form.stride, :: form.stride], x[:, :c], weight[:, :c]
        skipped = 0 if c == CHANNELS else 1  # the gradient of images with few channels
        found += [kernels.convolution(images, own, form)]
        found += kernels.convolution_backward(images, error, own, form, (not skipped, True))[skipped:]
        with torch.enable_grad():
            leaves = [t.float().clone().requires_grad_() for t in (images, own)]
            y = F.conv2d(leaves[0], leaves[1], stride=form.stride, padding=1)
            expected += [y, *torch.autograd.grad(y, leaves[skipped:], error.float())]
    for relu, added in ((False, None), (True, None), (True, torch.cos(x))):
        out, mean, rstd = kernels.group_norm(x, scale, scale, 4, 1e-5, relu, added)
        kept = None if added is None else out
        dx, dscale, dshift, dz = kernels.group_norm_backward(x, e, scale, scale, mean, rstd, relu, kept)
        found += [out, dx, dscale.sum(0), dshift.sum(0), *([] if dz is None else [dz])]
        with torch.enable_grad():
            leaves = [t.float().clone().requires_grad_() for t in (x, scale, scale)]
            y = F.group_norm(leaves[0], 4, leaves[1], leaves[2])
            if added is not None:
                leaves.append(added.float().requires_grad_())
                y = y + leaves[3]
            y = y.relu() if relu else y
            expected += [y, *torch.autograd.grad(y, leaves, e.float())]
    for ours, theirs in zip(found, expected, strict=True):
        if not (ours - theirs).norm() <= tolerance * theirs.norm():
            raise Unavailable("what the compiler made of them does not compute what torch computes")
