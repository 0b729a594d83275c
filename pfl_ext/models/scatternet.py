"""A linear classifier on ScatterNet's features, which are not learnt.

The scattering transform is Mallat's (Group Invariant Scattering, 2012) in two dimensions, as Oyallon and
Mallat (Deep Roto-Translation Scattering, 2015) apply it to CIFAR, and Tramèr and Boneh (arXiv 2011.11660) to
private learning: Morlet wavelets, a modulus, a Gaussian average. kymatio 0.3.0 has the same transform, and a
test compares the two; but ``import kymatio`` fails with scipy 1.17, and it takes one angle after another.

Shape letters: B images of a batch, C colours, S side of the input, J octaves, L angles, F features of a
colour (1 + J L + L^2 J (J - 1) / 2), n side of a padded map, K labels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.models.small import NETWORKS

COLOURS, OCTAVES, ANGLES = 3, 2, 8
SIGMA, FREQUENCY = 0.8, 3 * math.pi / 4
"""Width of the finest wavelet in pixels, and its centre in radians. An octave doubles the width and halves
the centre."""
PERIODS = range(-2, 3)
"""Number of periods of a map, in both directions, in which a wavelet is not negligible."""


def gabor(side: int, sigma: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A plane wave times a Gaussian of sum 1 around position 0, 0 of a periodic map: complex128 ``[n, n]``.

    Args:
        side: n.
        sigma: width along the wave, in pixels.
        angle: the wave's angle from the first axis, in radians.
        frequency: the wave's frequency, in radians a pixel.
        slant: width along the wave relative to that across it.
    """
    steps = torch.cat([torch.arange(side, dtype=torch.float64) + side * period for period in PERIODS])
    y, x = steps[:, None], steps[None, :]
    along = y * math.cos(angle) + x * math.sin(angle)
    across = slant * (x * math.cos(angle) - y * math.sin(angle))
    wave = torch.polar(torch.exp(-(along.square() + across.square()) / (2 * sigma**2)), frequency * along)
    repeated = wave.view(len(PERIODS), side, len(PERIODS), side).sum((0, 2))
    scaled: Tensor = repeated * (slant / (2 * math.pi * sigma**2))
    return scaled


def morlet(side: int, octave: int, angle: float) -> Tensor:
    """The real spectrum ``[n, n]`` of a wavelet of mean 0; arguments as for `gabor`."""
    sigma, frequency, slant = SIGMA * 2**octave, FREQUENCY / 2**octave, 4 / ANGLES
    wave, envelope = gabor(side, sigma, angle, frequency, slant), gabor(side, sigma, angle, 0, slant)
    spectrum: Tensor = torch.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real
    return spectrum


def narrowed(spectra: Tensor, filters: Tensor, octaves: int) -> Tensor:
    """Spectra of every ``2**octaves``-th row and column of filtered maps: ``[..., n, n]`` -> smaller."""
    side = spectra.shape[-1] >> octaves
    spans = [slice(start, start + side) for start in range(0, spectra.shape[-1], side)]
    total: Tensor = torch.zeros(())
    for rows in spans:
        for columns in spans:
            total = total + spectra[..., rows, columns] * filters[..., rows, columns]
    return total.div(4**octaves)


class Scattering(nn.Module):
    """``[B, C, S, S]`` -> ``[B, C F, S / 2**J, S / 2**J]``, without parameters.

    For each colour: its average, the average of each wavelet's modulus, and the average of the modulus of
    each coarser wavelet on each of these moduli. The image is continued by reflection.
    """

    wavelets: Tensor  # spectra [J, L, n, n]
    average: Tensor  # spectrum [n], of rows and of columns

    def __init__(self, side: int) -> None:
        super().__init__()
        unit = 2**OCTAVES
        if side <= unit or side % unit:
            raise ValueError(
                f"input_size is {side}, but scatternet halves the image {OCTAVES} times: use a multiple of "
                f"{unit} above {unit}"
            )
        self.side = side
        padded = side + 2 * unit
        turns = [math.pi * (ANGLES // 2 - 1 - k) / ANGLES for k in range(ANGLES)]
        waves = [torch.stack([morlet(padded, octave, turn) for turn in turns]) for octave in range(OCTAVES)]
        self.register_buffer("wavelets", torch.stack(waves).float(), False)
        average = torch.fft.fft2(gabor(padded, SIGMA * 2 ** (OCTAVES - 1), 0, 0, 1)).real[0]
        self.register_buffer("average", average.float(), False)

    def extra_repr(self) -> str:
        """Everything that its outputs depend on, for the digest of cached features."""
        return f"{self.side}, octaves={OCTAVES}, angles={ANGLES}"

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        padded = F.pad(images, [2**OCTAVES] * 4, mode="reflect").unsqueeze(2)
        image = torch.fft.fft2(padded)
        first, second = [], []
        for octave in range(OCTAVES):
            moduli = self._moduli(image, 0, octave)  # [B, C, L, n, n]
            first.append(self._averaged(moduli, octave))
            later = range(octave + 1, OCTAVES)
            spectra = torch.fft.fft2(moduli).unsqueeze(3) if later else moduli
            for other in later:
                both = self._moduli(spectra, octave, other)  # [B, C, L, L, n, n]
                second.append(self._averaged(both, other).flatten(2, 3))
        return torch.cat([self._averaged(padded, 0), *first, *second], 2).flatten(1, 2)

    def _moduli(self, spectra: Tensor, octave: int, later: int) -> Tensor:
        """The moduli of all wavelets of octave ``later``, on maps whose spectra are at ``octave``."""
        filters = low(low(self.wavelets[later], octave, -1), octave, -2)
        moduli: Tensor = torch.fft.ifft2(narrowed(spectra, filters, later - octave)).abs()
        return moduli

    def _averaged(self, maps: Tensor, octave: int) -> Tensor:
        """Averages of maps at ``octave``, without their border, which is one pixel wide at this scale."""
        kernel = torch.fft.ifft(low(self.average, octave, 0)).real
        steps = torch.arange(len(kernel), device=kernel.device)
        kept = steps[:: 2 ** (OCTAVES - octave)][1:-1]
        matrix = kernel[(kept[:, None] - steps) % len(kernel)]
        averages: Tensor = matrix @ maps @ matrix.T
        return averages


def low(spectra: Tensor, octaves: int, axis: int) -> Tensor:
    """The frequencies that maps of ``n / 2**octaves`` pixels have, along an axis of length n."""
    side = spectra.shape[axis]
    half = side >> (octaves + 1)
    return torch.cat([spectra.narrow(axis, 0, half), spectra.narrow(axis, side - half, half)], axis)


class ScatterNet(nn.Module):
    """The network; its features are the ``[B, C F S**2 / 4**J]`` that enter ``classifier``.

    ``model.channel_norm`` chooses the replacement of ``norm``. A group norm without scale and shift has
    ``model.groups`` groups of neighbouring channels, over all pixels of one image. It reads no other image,
    so the features of a user depend on no other user. The other choice is `pfl_ext.models.standardised`, with
    moments of all users' images, which a private run must release.
    """

    def __init__(self, num_labels: int, input_size: int) -> None:
        super().__init__()
        self.scattering = Scattering(input_size)
        channels = COLOURS * (1 + OCTAVES * ANGLES + ANGLES**2 * OCTAVES * (OCTAVES - 1) // 2)
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.classifier = nn.Linear(channels * (input_size // 2**OCTAVES) ** 2, num_labels)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, S, S]`` -> ``[B, K]``."""
        out: Tensor = self.classifier(self.norm(self.scattering(images)).flatten(1))
        return out


@NETWORKS.register("scatternet")
def scatternet(num_labels: int, input_size: int) -> ScatterNet:
    """``[B, 3, S, S]`` -> ``[B, K]``; 155,530 parameters for S = 32 and K = 10."""
    return ScatterNet(num_labels, input_size)
