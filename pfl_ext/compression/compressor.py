"""What every kind of compression offers, and the kinds by name.

A kind is a class under ``@register("name")`` in this folder: ``compression.kind: name`` chooses it, and each
field of its ``options`` is set as ``compression.options.FIELD``.

Compression is simulated: an update is replaced by what the server would decode, and the bytes of the message
are counted by a formula of shapes and options alone. Nothing is counted that depends on the values, as the
length of an entropy code would: such a length would tell of a user's images, and no privacy mechanism here
covers it.

Letters: d numbers of an update in L tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.configs import STRICT, NoOptions
from pfl_ext.registry import Registry

FLOAT = 4
"""Bytes of a number in float32, and of a place among fewer than 2^32."""
PLAIN = "float32"
"""The kind that changes nothing."""


@dataclass(frozen=True, config=STRICT)
class FeedbackOptions:
    """What every kind has that is biased, and needs to send later what it has left out.

    With error feedback a user sends ``C(x + e)`` and keeps ``e <- x + e - C(x + e)``, e being 0 at first
    (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv
    1901.09847, Algorithm 2). e is as large as the update, and is kept on disk for each user.
    """

    error_feedback: bool = True
    """Users keep what a message left out, and add it to their next update; needs disk for each user."""
    max_state_gb: PositiveFloat = 16.0
    """Most disk, in GB, for what users keep; rows that the last two checkpoints name are kept besides."""


class Compressor(ABC):
    """One kind of compression with its options."""

    options: ClassVar[type] = NoOptions
    """The frozen dataclass of its options; a `FeedbackOptions` for what contracts an update's error."""

    def __init__(self, options: Any) -> None:
        self.chosen = options

    @abstractmethod
    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """What the server reads from a message.

        Args:
            update: L finite float32 tensors, which are left as they are.
            rng: of this user in this round; what the server needs of it, both draw from the shared seed.

        Returns:
            Tensors of the same shapes; new ones, or those of the update.
        """

    @abstractmethod
    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """Bytes of a message, whatever the values."""


COMPRESSORS: Registry[type[Compressor]] = Registry("pfl_ext.compression", "compression.kind")
"""What ``compression.kind`` chooses by name."""
register = COMPRESSORS.register
"""Decorator of a kind's class."""


def count(shapes: Sequence[torch.Size]) -> int:
    """d."""
    return sum(shape.numel() for shape in shapes)


@register(PLAIN)
class Float32(Compressor):
    """No compression: four bytes a number."""

    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """The update."""
        return list(update)

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """``4 d``."""
        return FLOAT * count(shapes)
