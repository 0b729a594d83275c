"""Random features of a Gaussian kernel, between a network's own features and its last layer
(Rahimi and Recht 2007, "Random Features for Large-Scale Kernel Machines"; before Fed3R: Fani et al. 2024,
arXiv 2406.01116).

The features z of an image, brought to length 1, become

    phi(z) = sqrt(2 / D) cos(Omega z + beta),   Omega ~ N(0, 1 / width^2) [D, d],   beta ~ U[0, 2 pi) [D],

and the last layer takes phi(z). The product of two of these has the expectation

    E phi(x) . phi(z) = k(x, z) = exp(-|x - z|^2 / (2 width^2))

over the draw, and the variance ``(1 + (1 - k^2)^2) / (2 D)``: a linear layer on phi(z) is a kernel machine on
z but for an error that falls as ``1 / sqrt(D)``.

**Length 1.** A good width depends on the distances between features, which differ between networks. The usual
choice, their median, reads users' images, which a private run would have to pay for. Features of length 1 are
at most 2 apart for any network and data. So a width can be used again elsewhere, and the default depends on
no data. The length of a feature vector is lost.

**Privacy.** Omega and beta are functions of the run's seed, which all users and the server know; they are not
sent. ``|phi(z)|`` is at most ``sqrt(2)``, and 1 in the mean over the draw. Clipping bounds what a user sends
for any features, so an algorithm's privacy argument is the same with this layer as without it.

Shape letters: B images of a batch, d features of the network, D random features, K labels.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.models.memory import physical_memory
from pfl_ext.randomness import stream

BYTES = 4  # of a number


class RandomFeatures(nn.Module):
    """The map phi. It has buffers and no parameters, so it is not trained for any ``model.trained``.

    It is always computed in float32: a phase in bfloat16 would have errors of up to 0.02.

    Args:
        inputs: d.
        outputs: D.
        width: the kernel's width.
        seed: determines Omega and beta. A larger D extends them and keeps the first rows.

    Raises:
        ValueError: when Omega does not fit in this machine's memory.
    """

    frequencies: Tensor
    phases: Tensor
    width: Tensor

    def __init__(self, inputs: int, outputs: int, width: float, seed: int) -> None:
        super().__init__()
        need, there = BYTES * outputs * inputs, physical_memory()
        if need > there / 4:  # each lane and the kept best model have their own copy
            raise ValueError(
                f"model.random_features is {outputs}, and for {inputs} features of the network that takes "
                f"{need / 1e9:,.1f} GB in each copy of it, where there are {there / 1e9:,.1f}: choose fewer"
            )
        frequencies = stream(seed, "frequencies of random features").standard_normal(
            (outputs, inputs), np.float32
        )
        frequencies /= np.float32(width)
        phases = stream(seed, "phases of random features").uniform(0, 2 * math.pi, outputs)
        self.register_buffer("frequencies", torch.from_numpy(frequencies))
        self.register_buffer("phases", torch.from_numpy(phases.astype(np.float32)))
        self.register_buffer("width", torch.tensor(width, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, d]`` -> ``[B, D]``."""
        with torch.autocast(x.device.type, enabled=False):
            z = F.normalize(x.to(self.frequencies.dtype))
            angles = F.linear(z, self.frequencies, self.phases)
            return angles.cos() * math.sqrt(2 / len(self.phases))

    def extra_repr(self) -> str:
        """The layer's settings, as torch's layers print them."""
        outputs, inputs = self.frequencies.shape
        return f"in_features={inputs}, out_features={outputs}, width={float(self.width):g}"

    def check_width(self, width: float) -> None:
        """Refuse random features of another kernel, which were loaded with a last layer.

        Raises:
            ValueError: one line with both widths.
        """
        if not math.isclose(width, float(self.width), rel_tol=1e-6):
            raise ValueError(
                f"model.random_features_width is {width:g}, and the weights file's last layer was trained on "
                f"random features of width {float(self.width):g}: set it to that, or model.keep_head to false"
            )


class OnRandomFeatures(nn.Sequential):
    """Random features and a last layer on them, which replace a network's last layer.

    Args:
        random: the features.
        linear: from D to K.
    """

    random: RandomFeatures
    linear: nn.Linear

    def __init__(self, random: RandomFeatures, linear: nn.Linear) -> None:
        super().__init__(OrderedDict(random=random, linear=linear))

    def plain(self) -> nn.Linear:
        """An uninitialised last layer as the network would have without random features."""
        linear, inputs = self.linear, self.random.frequencies.shape[1]
        return nn.Linear(inputs, linear.out_features, linear.bias is not None, device="meta")
