"""FedBN: normalisation layers stay with the user
(Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", arXiv
2102.07623).

This is FedPer whose personal variables are the scale and shift of every trained norm, found by the type of
the layer and not by its name. The paper's FedBN also keeps running statistics at the user. Here training
changes none: networks trained from scratch have GroupNorm, and pretrained ones have frozen statistics. A
network without a trained norm is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.fedper import FedPer, TunedOptions
from pfl_ext.algorithms.personal_parts import personal_names


@register("fedbn")
class FedBN(FedPer):
    """FedPer with the norms as personal variables."""

    options: ClassVar[type] = TunedOptions
    takes: ClassVar[tuple[str, ...]] = ("compression",)

    @classmethod
    def kept_names(cls, module: Any, options: Any) -> Sequence[str]:
        """Names of the trained variables of norms."""
        return personal_names(module, "norms")
