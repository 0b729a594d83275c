"""ALIE: attackers agree on an update that is as far from the honest mean as remains unnoticed
(Baruch et al. 2019, "A Little Is Enough: Circumventing Defenses For Distributed Learning", arXiv 1902.06156,
Algorithm 3).

All send ``mean - z deviation``, computed for each coordinate over the honest updates of the round. z is the
normal quantile of ``(n - m - s) / (n - m)``. ``s = floor(n / 2 + 1) - m`` is the number of honest users that
the attackers need for a majority. For n = 100 and m = 20, z = 0.286.

Letters: n users of a round, m of them attackers.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import ClassVar

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from dataset.arrays import IntArray
from pfl_ext.aggregation.spool import Spool
from pfl_ext.attacks.attack import Attack, register
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class ALIEOptions:
    """The size of the deviation."""

    z: PositiveFloat | None = None
    """z, in standard deviations from the honest mean; none: the largest that n and m allow."""


def largest_z(n: int, m: int) -> float:
    """z for m attackers among n users, m below n / 2; 0 where no distance would remain unnoticed."""
    supporters = max(n // 2 + 1 - m, 1)
    share = (n - m - supporters) / (n - m)
    return NormalDist().inv_cdf(share) if 0.5 < share < 1 else 0.0


@register("alie")
class ALIE(Attack):
    """An attack in which all attackers send the same update."""

    options: ClassVar[type] = ALIEOptions
    colludes: ClassVar[bool] = True

    def collude(self, spool: Spool, honest: IntArray, bad: IntArray) -> None:
        """Write the attackers' update, block by block."""
        if not len(bad) or not len(honest):
            return
        z = largest_z(len(honest) + len(bad), len(bad)) if self.chosen.z is None else self.chosen.z
        for part, block in spool.coordinates(honest):
            spool.overwrite(bad, part, block.mean(0) - z * block.std(0))
