"""How fast the compiled layers are beside torch's, on one core: a network's layers, and a whole step.

    python -m benchmarks.bench.cpu_kernels [--arch lenet] [--pixels 224 64 32] [--images 16 3] [--repeats 7]

torch's layers have contiguous memory, in which they are fastest, and float32; ours both types, where the
processor has arithmetic with half floats. All run in turn, and the least time of all repeats counts, so that
other work on the machine does not.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.core.code_version import commit
from benchmarks.core.facts import hardware
from benchmarks.reporting.tables import print_row
from dataset.cli import OneLineParser
from dataset.cli import run as run_command
from pfl_ext.engine.cpu.build import Unavailable
from pfl_ext.engine.cpu.check import checked
from pfl_ext.engine.cpu.choice import BY_PROCESSOR, FLOAT32
from pfl_ext.engine.cpu.convolutions import Convolution
from pfl_ext.engine.cpu.kernels import CpuKernels, Form
from pfl_ext.engine.cpu.layers import CpuLayers
from pfl_ext.models.classifier import build_backbone, memory_format
from pfl_ext.models.config import ModelConfig

LABELS = 17


def least(works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Milliseconds of each, the least of all rounds."""
    times = [float("inf")] * len(works)
    for _ in range(repeats + 1):
        for i, work in enumerate(works):
            begin = time.perf_counter()
            work()
            times[i] = min(times[i], 1e3 * (time.perf_counter() - begin))
    return times


def layers(network: nn.Module, images: int, pixels: int) -> dict[tuple[int, ...], tuple[Convolution, int]]:
    """The compiled convolutions that differ, by (C, K, side, kernel, stride): one of them, and how many."""
    found: dict[tuple[int, ...], tuple[Convolution, int]] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        assert isinstance(layer, Convolution)
        key = (
            layer.in_channels,
            layer.out_channels,
            inputs[0].shape[2],
            layer.kernel_size[0],
            layer.stride[0],
        )
        found[key] = (layer, found.get(key, (layer, 0))[1] + 1)

    hooks = [
        layer.register_forward_pre_hook(note) for layer in network.modules() if isinstance(layer, Convolution)
    ]
    with torch.no_grad():
        network(torch.zeros(images, 3, pixels, pixels))
    for hook in hooks:
        hook.remove()
    return found


def layer_times(layer: Convolution, images: int, side: int, repeats: int) -> list[float]:
    """Forward and backward by torch, both by ours, and both by ours in bfloat16, if that is there."""
    x = torch.randn(images, layer.in_channels, side, side)
    form: Form = layer.form
    e = torch.randn(images, layer.out_channels, *form.output(side, side))
    weight = layer.weight.detach().contiguous()
    ours = [t.contiguous(memory_format=torch.channels_last) for t in (x, e, weight)]
    kernels, wanted = layer.kernels, (True, True)
    stride, padding, dilation = [form.stride] * 2, [form.top, form.left], [1, 1]
    backward = torch.ops.aten.convolution_backward
    works: list[Callable[[], object]] = [
        lambda: F.conv2d(x, weight, stride=stride, padding=padding),
        lambda: backward(e, x, weight, None, stride, padding, dilation, False, [0, 0], 1, [*wanted, False]),
    ]
    for dtype in types(kernels):
        a, b, w = ours[0].to(dtype), ours[1].to(dtype), ours[2]
        works.append(partial(kernels.convolution, a, w, form))
        works.append(partial(kernels.convolution_backward, a, b, w, form, wanted))
    return least(works, repeats)


def types(kernels: CpuKernels) -> list[torch.dtype]:
    """The data types that the compiled layers compute with."""
    return [torch.float32, torch.bfloat16] if kernels.has_halves else [torch.float32]


def step(
    network: nn.Module, images: int, pixels: int, dtype: torch.dtype = torch.float32
) -> Callable[[], object]:
    """A training step's gradients; in bfloat16 as torch's autocast has it."""
    format = memory_format(next(network.parameters()))
    x = torch.randn(images, 3, pixels, pixels).contiguous(memory_format=format)
    targets = (torch.rand(images, LABELS) < 0.3).float()
    parameters = list(network.parameters())

    def work() -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False):
            logits = network(x)
        loss = F.binary_cross_entropy_with_logits(logits.float(), targets)
        return torch.autograd.grad(loss, parameters)

    return work


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = OneLineParser(prog="python -m benchmarks.bench.cpu_kernels", description=__doc__)
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--pixels", type=int, nargs="+", default=[224, 64, 32])
    parser.add_argument("--images", type=int, nargs="+", default=[16, 3])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    if min(*options.pixels, *options.images, options.repeats) < 1 or min(options.pixels) < 32:
        raise ValueError("--images and --repeats must be at least 1, and --pixels at least 32")
    torch.set_num_threads(1)
    try:
        kernels = checked()
    except Unavailable as reason:
        raise ValueError(f"there is nothing to measure: {reason}") from reason
    row = BY_PROCESSOR["AVX512-FP16"] if kernels.has_halves else FLOAT32
    taken: dict[int, nn.Module] = {}
    print(f"{hardware()}; torch {torch.__version__}; commit {commit()}\n")
    names = ["ours", "ours in bf16"][: len(types(kernels))]
    print_row("pixels, images", "step by torch, ms", *(f"{name}, ms | ratio" for name in names))
    print_row(*["---"] * (2 + 2 * len(names)))
    for pixels in options.pixels:
        config = ModelConfig(options.arch, pixels, init="keras")
        theirs = build_backbone(config, LABELS, torch.Generator().manual_seed(0))
        taken[pixels] = ours = CpuLayers(kernels, row).replaced(copy.deepcopy(theirs))
        for images in options.images:
            works = [step(theirs, images, pixels)]
            works += [step(ours, images, pixels, dtype) for dtype in types(kernels)]
            first, *others = least(works, options.repeats)
            print_row(f"{pixels}, {images}", f"{first:.1f}", *(f"{t:.1f} | {first / t:.2f}" for t in others))
    print()
    print_row(
        "images", "C, K, side, kernel, stride", "layers", "way", "torch, forward + backward, ms", *names
    )
    print_row(*["---"] * (5 + len(names)))
    for pixels in options.pixels:
        for images in options.images:
            for key, (layer, count) in layers(taken[pixels], images, pixels).items():
                side = key[2]
                times = layer_times(layer, images, side, options.repeats)
                way = "Winograd" if layer.form.pays(images, side, side) else "direct"
                pairs = (f"{a:.2f} + {b:.2f}" for a, b in zip(times[::2], times[1::2]))
                print_row(str(images), ", ".join(map(str, key)), str(count), way, *pairs)


if __name__ == "__main__":
    sys.exit(run_command(main))
