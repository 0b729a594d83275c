"""The interface of every kind of compression, and the kinds by name.

A kind is a class under ``@register("name")`` in this folder: ``compression.kind: name`` chooses it, and each
field of its ``options`` is set as ``compression.options.FIELD``.

Compression is simulated: an update is replaced by what the server would decode. The bytes of a message are
computed from shapes and options alone. They never depend on the values, as the length of an entropy code
would: such a length would reveal something about a user's images, and no privacy mechanism here covers it.

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
"""Bytes of a float32 number, and of a position among fewer than 2^32."""
PLAIN = "float32"
"""Name of the kind that changes nothing."""


@dataclass(frozen=True, config=STRICT)
class FeedbackOptions:
    """Options of every biased kind, which must send later what it has left out.

    With error feedback a user sends ``C(x + e)`` and keeps ``e <- x + e - C(x + e)``, with e = 0 at first
    (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv
    1901.09847, Algorithm 2). e is as large as the update, and is kept on disk for each user.
    """

    error_feedback: bool = True
    """Whether users add a message's error to their next update (error feedback); needs disk for each user."""
    max_state_gb: PositiveFloat = 16.0
    """Most disk space, in GB, for the users' errors, without old rows that the last two checkpoints need."""


class Compressor(ABC):
    """A kind of compression with its options."""

    options: ClassVar[type] = NoOptions
    """The frozen dataclass of its options; a `FeedbackOptions` for a kind that can have error feedback."""

    def __init__(self, options: Any) -> None:
        self.chosen = options

    @abstractmethod
    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """The update as the server decodes it from a message.

        Args:
            update: L finite float32 tensors, which are not changed.
            rng: this user's generator in this round; user and server both draw it from the shared seed.

        Returns:
            Tensors of the same shapes; new ones, or those of the update.
        """

    @abstractmethod
    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """Bytes of a message, which do not depend on its values."""


COMPRESSORS: Registry[type[Compressor]] = Registry("pfl_ext.compression", "compression.kind")
"""What ``compression.kind`` chooses by name."""
register = COMPRESSORS.register
"""Class decorator that registers a kind under a name."""


def count(shapes: Sequence[torch.Size]) -> int:
    """d, the number of numbers in an update."""
    return sum(shape.numel() for shape in shapes)


@register(PLAIN)
class Float32(Compressor):
    """No compression: four bytes a number."""

    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """The update itself."""
        return list(update)

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """``4 d``."""
        return FLOAT * count(shapes)
