"""FedVC: virtual clients, all of one size
(Hsu, Qi, Brown 2020, "Federated Visual Classification with Real-World Data Distribution", Section 5.3,
arXiv 2003.08082).

In every round each user that takes part trains on the same number of images. Users are drawn with a
probability proportional to their number of images, and the server averages them with equal weights. So a user
with many images acts as many clients, and one with few is seldom drawn. This can be combined with any
algorithm on pfl's loop.

With privacy: `take` acts on one user's images, before its update is clipped. Cohorts in proportion to images
are refused, since no accountant here covers probabilities that depend on all users' images.

Letters: n images of a user, U users.
"""

from __future__ import annotations

import numpy as np
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from dataset.arrays import FloatArray, IntArray
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class VirtualOptions:
    """FedVC's option, in addition to the sampling of cohorts."""

    virtual_size: PositiveInt | None = None
    """Images drawn from each user in a round, whatever its size (FedVC, Hsu et al. 2020, 5.3); none: all."""

    def check_virtual(self, by_images: bool) -> None:
        """Refuse to weight users by their images, since all have the same number.

        Raises:
            ValueError: one line with the reason.
        """
        if self.virtual_size and by_images:
            raise ValueError(
                "local.virtual_size gives all users the same number of images: set federated.weighting "
                "to users"
            )


def take(rows: IntArray, size: int, rng: np.random.Generator) -> IntArray:
    """Exactly ``size`` of a user's rows ``[n]``, in the store's order; none for a user without rows.

    They are drawn without replacement if n >= ``size``. Otherwise they are drawn with replacement, so that
    some come twice and some not at all. If n equals ``size``, nothing is drawn.
    """
    if 0 < len(rows) < size:
        return rows[np.sort(rng.integers(len(rows), size=size))]
    if len(rows) > size:
        return rows[np.sort(rng.choice(len(rows), size, replace=False))]
    return rows


def taking_part(sizes: IntArray, size: int) -> IntArray:
    """``[U]``: the number of images that users with ``sizes`` images train on."""
    return np.where(sizes > 0, size, 0)


def chances(sizes: IntArray) -> FloatArray | None:
    """Probabilities ``[U]`` of users with ``sizes`` images; None means equal ones, for equal sizes."""
    return sizes / sizes.sum() if (sizes != sizes[0]).any() else None
