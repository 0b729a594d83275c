"""Correlated noise that partly cancels itself: banded matrix factorisation (DP-FTRL), soundly accounted.

Letters: T rounds, b band, P parameters, k participations of one user, z noise multiplier. X ``[T, P]`` holds
the rounds' sums of clipped updates (each update at most 1 long, in units of the bound), A ``[T, T]`` is the
lower triangle of ones, Z ``[T, P]`` independent N(0, z^2), C ``[T, T]`` lower triangular with b diagonals.

``C X + Z`` is private. The release ``X + C^-1 Z`` is a function of it: round t gets row t of ``C^-1 Z``. The
server's sum over rounds, ``A X``, then has the noise ``A C^-1 Z``, which is smaller than the ``A Z`` of
independent noise.

**Sensitivity.** A user in rounds i of a set S changes ``C X`` by the sum of ``C[:, i] g_i``,
each g_i at most 1 long. If rounds in S are at least b apart, their columns of C share no row, so the squared
change is at most the sum of ``|C[:, i]|^2`` (Choquette-Choo et al. 2022 and 2023, arXiv 2211.06530 and
2306.08153). Every *column* here has norm 1, so the change is at most sqrt(k), as for k rounds of independent
noise with the same z. This also holds for updates that depend on earlier rounds (Denisov et al. 2022, arXiv
2202.08312), and so for an adaptive bound, since X is in units of each round's bound.

**The factor** (`BandedFactor`). The square root of A is the Toeplitz matrix of 1, 1/2, 3/8, 5/16, ...; C has
its first b diagonals (Kalinin and Lampert 2024, arXiv 2405.13763), with every column scaled to norm 1. No
solver is used, so it is the same on every machine and after a resume. The root mean square error of the
running sums is 6 % above that of the best Toeplitz band for T = 150 and b = 8, and 16 % for T = 5,000
(computed by L-BFGS).

**pfl's** `BandedMatrixFactorizationMechanism` is not used. It optimises a Gram matrix ``C^T C`` but takes for
C Cholesky's factor of ``C C^T``. So its rows have norm 1 and not its columns, which are up to 2.3 long. The
sensitivity for a user of k rounds is 1.14 to 1.2 times the sqrt(k) accounted for (T = 32, 64, 150). It does
not enforce the separation, draws from 32-bit seeds, and starts from the beginning after a resume.

**Amplification** by sampling within b groups in turn (2306.08153) is not offered. At the paper's setting its
running sums, with this factor and b = 2, 4, 8, are 5, 11 and 18 % noisier than plain Poisson sampling
(computed). The band is for cohorts that cannot be drawn at random and kept secret.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from dataset.arrays import FloatArray
from pfl_ext.privacy.mechanisms import gaussian_noise
from pfl_ext.randomness import derive


def square_root_coefficients(band: int) -> FloatArray:
    """``[b]``: the first diagonals of the square root of A, ``(2k over k) / 4^k``."""
    k = np.arange(1, band)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


@dataclass(frozen=True)
class BandedFactor:
    """C for T rounds: Toeplitz with b diagonals, every column divided by its norm.

    ``C = L D^-1`` with L Toeplitz and D the norms of its columns, so that ``C^-1 = D L^-1``. For b = 1 both
    are the identity: independent noise.
    """

    num_rounds: int
    band: int

    def __post_init__(self) -> None:
        assert self.num_rounds > 0
        assert self.band > 0

    @cached_property
    def coefficients(self) -> FloatArray:
        """``[min(b, T)]``: the diagonals of L."""
        return square_root_coefficients(min(self.band, self.num_rounds))

    @cached_property
    def column_norms(self) -> FloatArray:
        """``[T]``: D; the last b - 1 columns are cut off by the last round."""
        norms = np.sqrt(np.cumsum(self.coefficients**2))
        left = np.minimum(np.arange(self.num_rounds, 0, -1), len(norms))
        return np.asarray(norms[left - 1])

    @cached_property
    def inverse_coefficients(self) -> FloatArray:
        """``[T]``: the diagonals of L^-1."""
        out, diagonals = np.zeros(self.num_rounds), self.coefficients
        out[0] = 1.0
        for t in range(1, self.num_rounds if self.band > 1 else 1):
            n = min(len(diagonals) - 1, t)
            out[t] = -diagonals[1 : n + 1] @ out[t - n : t][::-1]
        return out

    @cached_property
    def noise_scales(self) -> FloatArray:
        """``[T]``: norms of the rows of C^-1, so the standard deviation of each round's noise over z."""
        return np.asarray(self.column_norms * np.sqrt(np.cumsum(self.inverse_coefficients**2)))

    def matrix(self) -> FloatArray:
        """C itself, ``[T, T]``."""
        toeplitz = np.zeros((self.num_rounds, self.num_rounds))
        for k, value in enumerate(self.coefficients):
            toeplitz += np.diag(np.full(self.num_rounds - k, value), -k)
        return np.asarray(toeplitz / self.column_norms)


class CorrelatedNoise:
    """Rows of ``C^-1 Z`` for z = 1, one for each round, as functions of (seed, round) alone.

    Row t is ``D_t y_t`` with ``y_t = z_t - sum_k L_k y_(t-k)`` over the last b - 1 rows y. These are kept (4
    P b bytes) while rounds come in order. Otherwise, for example after a resume, all are computed again from
    the first round on, which draws P numbers for each.
    """

    def __init__(self, factor: BandedFactor, threads: int = 1) -> None:
        self._factor, self._threads = factor, threads
        self._recent: deque[Tensor] = deque(maxlen=len(factor.coefficients) - 1)
        self._next, self._key = 0, (0, 0)

    def __call__(self, seed: int, round_number: int, size: int) -> tuple[Tensor, float]:
        """The noise ``[size]`` of one round and its standard deviation."""
        if round_number < self._next or self._key != (seed, size):
            self._recent.clear()
            self._next, self._key = 0, (seed, size)
        if self._recent.maxlen == 0:
            self._next = round_number
        while self._next < round_number:
            self._step(seed, size)
        row = self._step(seed, size)
        scale = float(self._factor.column_norms[round_number])
        return row * scale, float(self._factor.noise_scales[round_number])

    def _step(self, seed: int, size: int) -> Tensor:
        row = gaussian_noise(derive(seed, "dp noise", self._next), size, self._threads)
        for coefficient, past in zip(self._factor.coefficients[1:], reversed(self._recent)):
            row.sub_(past, alpha=float(coefficient))
        self._recent.append(row)
        self._next += 1
        return row
