"""The Triton kernels, by Triton's interpreter on a CPU and, where there is one, on a GPU.

test_gpu_kernels DEVICE          compares them with torch's float64, and prints what is off
test_gpu_kernels compiled        compiles them for an H100, which needs no GPU
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from dataset import process

if __name__ == "__main__":
    process.begin()

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_ext.engine.layout import Layout
from pfl_ext.engine.short_weights import ShortWeights, padded
from pfl_ext.engine.training import LocalTraining
from tests.launching import environment, warmly

FORMS = [
    (2, 8, 5, 7, 2),
    (1, 32, 6, 7, 16),
    (1, 96, 14, 13, 8),
    (2, 96, 9, 9, 3),
    (2, 96, 9, 9, 12),
    (1, 16, 37, 33, 4),
    (4, 32, 1, 1, 4),
    (1, 32, 1, 1, 8),
]
"""Images, channels, height, width, groups: full tiles and others, powers of two and other numbers; images of
which a program holds some channels whole, and others."""
TILED = FORMS[2]
"""An image of which no program holds a channel whole."""
JOINED = [(False, False), (True, False), (True, True)]
"""Whether a ReLU follows, and whether something is added before it."""
ROUNDING = {torch.float32: 2 * 70 * 2.0**-24, torch.bfloat16: 2.0**-8}
"""For float32, sums of up to 4,884 numbers, twice, each of which may be off by the root of so many roundings.
For bfloat16: what is written is rounded once, by half a unit of 2^-8, and so is one of two sums before it."""


def compare(device: str, forms: Sequence[tuple[int, ...]] = FORMS) -> list[str]:
    """What is further from float64 than rounding may take it."""
    from pfl_ext.engine.gpu_kernels import group_norm, group_norm_backward, over_images

    found = []
    for seed, (form, (relu, adding)) in enumerate(product(forms, JOINED)):
        if device == "cpu" and form != TILED and seed % len(JOINED) != forms.index(form) % len(JOINED):
            continue  # the interpreter takes a second for what a GPU does at once
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        n, c, h, w, groups = form
        draw = torch.Generator().manual_seed(seed)

        def image(draw: torch.Generator = draw, dtype: torch.dtype = dtype) -> Tensor:
            made = (torch.randn(n, c, h, w, generator=draw) * 2 + 3).to(dtype)  # noqa: B023
            return made.to(device).contiguous(memory_format=torch.channels_last)

        x, added, e = image(), image() if adding else None, image()
        weight, bias = (torch.randn(c, generator=draw).to(device) for _ in range(2))
        out, mean, rstd = group_norm(x, weight, bias, groups, 1e-5, relu, added)
        dx, scale, shift, dz = group_norm_backward(
            x, e, weight, bias, mean, rstd, relu, out if adding else None
        )
        exact = [
            t.double().requires_grad_() for t in (x, weight, bias, *([added] if added is not None else []))
        ]
        whole = F.group_norm(exact[0], groups, exact[1], exact[2], 1e-5)
        whole = whole + exact[3] if adding else whole
        whole = whole.relu() if relu else whole
        gradients = torch.autograd.grad((whole * e.double()).sum(), exact)
        ours = [out, dx, *over_images(scale, shift), *([dz] if dz is not None else [])]
        for name, mine, theirs in zip(("out", "x", "scale", "shift", "added"), ours, (whole, *gradients)):
            written = dtype if name in ("out", "x", "added") else torch.float32
            off = float((mine.double() - theirs).detach().norm() / theirs.detach().norm().clamp(min=1e-3))
            if not off <= ROUNDING[written]:
                found.append(f"{form} relu={relu} added={adding} {dtype} {name}: {off:.1e}")
        assert out.is_contiguous(memory_format=torch.channels_last)
        bad = x.clone()
        bad[0, 0, 0, 0] = float("nan")
        spread, *_ = group_norm(bad, weight, bias, groups, 1e-5, relu, added)
        if form in (FORMS[0], TILED) and not spread.isnan().any():
            found.append(f"{form} relu={relu}: what is not a number was lost")
    return found


TRAININGS: list[dict[str, Any]] = [
    {},
    {"clipping": "variable", "max_norm": 0.9},
    {"clipping": "variable", "max_norm": 1e3, "momentum": 0.9},
    {
        "clipping": "global",
        "max_norm": 0.5,
        "momentum": 0.9,
        "weight_decay": 0.01,
        "factors": (1.0, 3.0, 0.5, 1.0),
    },
    {"weight_decay": 0.1, "rate_varies": True},
    {"clipping": "global", "max_norm": 1e3},
]


def compare_steps(device: str, trainings: Sequence[dict[str, Any]] = TRAININGS) -> list[str]:
    """Two steps of each training, beside the same in float64."""
    from pfl_ext.engine.gpu_kernels import over_images
    from pfl_ext.engine.gpu_steps import Steps

    found = []
    shapes = [torch.Size(s) for s in ((40, 8, 3, 3), (40,), (9, 700), (3, 5, 1, 1))]
    strides = [(72, 1, 24, 8), (1,), (700, 1), (5, 1, 5, 5)]
    sizes = tuple(s.numel() for s in shapes)
    layout = Layout(tuple("abcd"), sizes, tuple(shapes), tuple(strides), torch.device(device))
    for (number, words), short in product(enumerate(trainings), ([False] * 4, [True, False, True, False])):
        draw = torch.Generator().manual_seed(number)
        whole = {
            "learning_rate": 0.3,
            "num_epochs": 1,
            "batch_size": 4,
            "clipping": "none",
            "max_norm": 0.0,
            "mu": 0.0,
        }
        local = LocalTraining(**{**whole, "amp": None, **words})
        start = torch.randn(sum(sizes), generator=draw)
        own: Any = object.__new__(ShortWeights)
        own.weights, velocity = (torch.full_like(start, float("nan")).to(device) for _ in range(2))
        room = sum(padded(size) for size, is_short in zip(sizes, short) if is_short)
        own.short = torch.zeros(room, dtype=torch.bfloat16, device=device) if any(short) else None
        rate = torch.tensor(0.25) if local.rate_varies else torch.tensor(1.0)
        exact, speed = start.double(), torch.zeros(sum(sizes)).double()
        steps, here = Steps(layout, short), start.to(device)
        steps.prepare(local)
        for first in (True, False):
            gradients = [torch.randn(s, generator=draw) for s in shapes]
            gradients = [g.bfloat16() if is_short else g for g, is_short in zip(gradients, short)]
            steps.step(
                [g.to(device) for g in gradients], local, first, here if first else own.weights, own,
                velocity if local.momentum else None, rate.to(device) if local.rate_varies else None,
            )  # fmt: skip
            wide = [g.double() for g in gradients]
            norms = [g.norm() for g in wide]
            if local.clipping == "variable":
                wide = [g * min(1.0, local.max_norm / n) for g, n in zip(wide, norms)]
            if local.clipping == "global":
                wide = [g * min(1.0, local.max_norm / (torch.stack(norms).norm() + 1e-6)) for g in wide]
            flat = [
                torch.empty_strided(s, t, dtype=torch.float64).copy_(g)
                for s, t, g in zip(shapes, strides, wide)
            ]
            g = torch.cat([t.as_strided((t.numel(),), (1,)) for t in flat]) + local.weight_decay * exact
            speed = local.momentum * speed + g
            each = torch.cat([torch.full((n,), f) for n, f in zip(sizes, local.each_factor(4))]).double()
            exact = exact - 0.3 * rate.double() * each * (speed if local.momentum else g)
        off = float((own.weights.cpu().double() - exact).norm() / exact.norm())
        if not off <= 2.0**-20:
            found.append(f"step {words} short={short}: {off:.1e}")
        at, cut_off = 0, 2.0**-8 if device == "cuda" else 2.0**-7  # Triton's interpreter does not round
        for part, is_short in zip(torch.split(own.weights, list(sizes)), short):
            there = own.short[at : at + len(part)] if is_short else part
            at += padded(len(part)) if is_short else 0
            if not ((there - part).abs() <= cut_off * part.abs()).all():
                found.append(f"step {words}: the short weights are not the float32 ones")
    for dtype, bad in product((torch.float32, torch.float64), (False, True)):
        after = torch.randn(sum(sizes), generator=draw)
        after[7] = float("nan") if bad else after[7]
        sums = torch.randn(sum(sizes), generator=draw).to(dtype)
        scales = torch.tensor([0.0, 0.5, 1.0, 0.25], dtype=torch.float64)
        parts = torch.split((after - start).double(), list(sizes))
        each = torch.cat([torch.full((n,), s) for n, s in zip(sizes, scales.tolist())]).double()
        wanted = sums.double() + 2.0 * torch.where(each == 0, 0.0, each * (after - start).double())
        there = sums.to(device)
        steps.add(after.to(device), here, scales.to(device), 2.0, there)
        if not float((there.cpu().double() - wanted).norm() / wanted.norm()) < 2.0**-20:
            found.append(f"a sum of {dtype} is off")
        squares = steps.squared_norms(after.to(device), here).cpu()
        exact = torch.stack([part.square().sum() for part in parts])
        same = (squares / exact - 1).abs() < 2.0**-20
        if same.tolist() != [not bad, True, True, True] or bool(squares[0].isnan()) is not bad:
            found.append(f"squared norms are off: {squares} and {exact}")
    many = [torch.randn(130, 70, generator=torch.Generator().manual_seed(seed)).to(device) for seed in (1, 2)]
    for total, part in zip(over_images(*many), many):
        if not float((total.double() - part.double().sum(0)).norm() / part.double().sum(0).norm()) < 2.0**-20:
            found.append("sums over images are off")
    return found


class NoGpu:
    """Stands for an H100 as a target of Triton's compiler."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compiled() -> list[str]:
    """Compile the kernels for an H100; the names of those that were forgotten."""
    from triton.runtime import driver  # type: ignore[import-untyped]
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

    names, real = set(), JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        names.add(kernel.fn.__name__)
        return real(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    driver.set_active(NoGpu())
    compare("cpu", [FORMS[0], TILED, *FORMS[-2:]])
    compare_steps("cpu", [TRAININGS[1], TRAININGS[3], TRAININGS[4]])
    inner = {"_tile", "_of_group", "_of_channels", "signal", "_block", "_by_group", "_by_channel"}
    inner |= {"_gradient", "_places"}
    from pfl_ext.engine import gpu_kernels, gpu_small_images, gpu_steps

    modules = vars(gpu_kernels) | vars(gpu_small_images) | vars(gpu_steps)
    ours = {name for name, value in modules.items() if isinstance(value, JITFunction)}
    return sorted(ours - inner - names)


@pytest.mark.parametrize("device", ["cpu", "cuda", "compiled"])
def test_kernels_compute_what_torch_does(device: str) -> None:
    pytest.importorskip("triton", reason="torch without CUDA has no Triton")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    interpreter = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    place = "tests.pfl_ext.engine.test_gpu_kernels"
    # Triton reads at its import whether it interprets.
    command = [sys.executable, "-m", place, device] if interpreter else warmly(place, device)
    done = subprocess.run(
        command, env=environment(**interpreter), capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


if __name__ == "__main__":
    import pfl_ext as pfl_ext  # before pfl, see there

    if sys.argv[1] == "compiled":
        print(*compiled(), sep="\n", end="")
    else:
        print(*compare(sys.argv[1]), *compare_steps(sys.argv[1]), sep="\n", end="")
    process.ends(0)
