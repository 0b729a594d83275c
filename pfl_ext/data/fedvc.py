"""FedVC: virtual clients, all of one size
(Hsu, Qi, Brown 2020, "Federated Visual Classification with Real-World Data Distribution", Section 5.3,
arXiv 2003.08082).

In every round each user that takes part trains on the same number of images, and users are drawn with a
probability proportional to how many they have; the server averages users alike. So a heavy user is many
clients, and a small one is seldom drawn. It goes with any algorithm of pfl's loop.

With privacy: `take` acts on one user's images, before its update is clipped. Cohorts in proportion to images
are refused, as a probability that depends on all users' images is in no accounting here.

Letters: n images of a user, U users.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from pfl_ext.configs import STRICT

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, config=STRICT)
class VirtualOptions:
    """The option of FedVC besides the sampling of cohorts."""

    virtual_size: PositiveInt | None = None
    """Images drawn from each user in a round, whatever it has (FedVC, Hsu et al. 2020, 5.3); none: all."""

    def check_virtual(self, by_images: bool) -> None:
        """Refuse a weighting of users by their images, which are as many for all.

        Raises:
            ValueError: one line.
        """
        if self.virtual_size and by_images:
            raise ValueError(
                "local.virtual_size makes all users of one size: set federated.weighting to users"
            )


def take(rows: IntArray, size: int, rng: np.random.Generator) -> IntArray:
    """Exactly ``size`` of a user's rows ``[n]``, in the store's order, or none of a user that has none.

    From as many or more they are drawn without replacement, and from fewer each of them from all ("with
    replacement"), so that some come twice and some not at all. Where all take part nothing is drawn.
    """
    if 0 < len(rows) < size:
        return rows[np.sort(rng.integers(len(rows), size=size))]
    if len(rows) > size:
        return rows[np.sort(rng.choice(len(rows), size, replace=False))]
    return rows


def taking_part(sizes: IntArray, size: int) -> IntArray:
    """How many images users with so many train on, ``[U]``."""
    return np.where(sizes > 0, size, 0)


def chances(sizes: IntArray) -> npt.NDArray[np.float64] | None:
    """Probabilities ``[U]`` of users with so many images; None, which means alike, where all have as many."""
    return sizes / sizes.sum() if (sizes != sizes[0]).any() else None
