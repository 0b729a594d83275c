"""The Triton kernels, by Triton's interpreter on a CPU and, where there is one, on a GPU.

test_gpu_kernels DEVICE          compares them with torch's float64, and prints what is off
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

FORMS = [(2, 8, 5, 7, 2), (1, 32, 6, 7, 16), (1, 96, 14, 13, 8), (2, 96, 9, 9, 3)]
"""Images, channels, height, width, groups: full tiles and others, powers of two and other numbers."""
ROUNDING = {torch.float32: 2 * 48 * 2.0**-24, torch.bfloat16: 2.0**-8}
"""For float32, sums of up to 2,184 numbers, twice, each of which may be off by the root of so many roundings.
For bfloat16: what is written is rounded once, by half a unit of 2^-8, and so is one of two sums before it."""


def compare(device: str) -> list[str]:
    """What is further from float64 than rounding may take it."""
    from pfl_ext.engine.gpu_kernels import group_norm, group_norm_backward

    found = []
    for seed, (form, relu, adding, dtype) in enumerate(
        product(FORMS, (False, True), (False, True), (torch.float32, torch.bfloat16))
    ):
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
        ours = [out, dx, scale.sum(0), shift.sum(0), *([dz] if dz is not None else [])]
        for name, mine, theirs in zip(("out", "x", "scale", "shift", "added"), ours, (whole, *gradients)):
            written = dtype if name in ("out", "x", "added") else torch.float32
            off = float((mine.double() - theirs).detach().norm() / theirs.detach().norm().clamp(min=1e-3))
            if not off <= ROUNDING[written]:
                found.append(f"{form} relu={relu} added={adding} {dtype} {name}: {off:.1e}")
        assert out.is_contiguous(memory_format=torch.channels_last)
        bad = x.clone()
        bad[0, 0, 0, 0] = float("nan")
        if form == FORMS[0] and not group_norm(bad, weight, bias, groups, 1e-5, relu, added)[0].isnan().any():
            found.append(f"{form} relu={relu}: what is not a number was lost")
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_group_norms_are_torchs(device: str) -> None:
    pytest.importorskip("triton", reason="torch without CUDA has no Triton")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    interpreter = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    command = [sys.executable, "-m", "tests.pfl_ext.engine.test_gpu_kernels", device]
    done = subprocess.run(
        command, env={**os.environ, **interpreter}, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


if __name__ == "__main__":
    import pfl_ext as pfl_ext  # before pfl, see there

    for line in compare(sys.argv[1]):
        print(line)
