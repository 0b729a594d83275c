"""Networks that consist of an encoder (`pfl_ext.models.encoders`) and a decoder of its maps.

Each file with decoders is for one task, and registers a network for each encoder. Pretrained weights are only
for the encoder. A decoder is new, has GroupNorm, and is always trained.

Shape letters: B images of a batch, S the side of the input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from pfl_ext.models.config import ModelConfig
from pfl_ext.models.encoders import Encoder, Form
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.task import Outputs, Task

_TARGETS: ContextVar[Tensor | None] = ContextVar("the targets of the images in a forward pass", default=None)


@contextlib.contextmanager
def taught(targets: Tensor | None) -> Iterator[None]:
    """In this context and thread, a network that samples near the true boxes has access to these targets.

    Args:
        targets: the targets of the images that go through the network in this context; None in evaluation.
    """
    token = _TARGETS.set(targets)
    try:
        yield
    finally:
        _TARGETS.reset(token)


def targets_of_images() -> Tensor | None:
    """The targets of the images that go through the network at present, in training; otherwise None."""
    return _TARGETS.get()


class Decoder(nn.Module):
    """Computes a task's outputs from an encoder's maps; only its last layer or `by_class` is for classes."""

    by_class: ClassVar[str] = ""
    """Name of its module whose weights depend on the classes, if that is not the last layer."""

    def forward(self, maps: Sequence[Tensor], images: Tensor) -> Tensor:
        """The encoder's maps, and the images ``[B, 3, S, S]``, whose size alone is read -> ``[B, ...]``."""
        raise NotImplementedError


class EncoderDecoder(nn.Module):
    """An encoder, and a decoder of its maps.

    Args:
        encoder: computes the maps.
        decoder: takes maps with these channels.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, S, S]`` -> the decoder's outputs."""
        out: Tensor = self.decoder(self.encoder(images), images)
        return out


@dataclass(frozen=True)
class Architecture:
    """Builds one of these networks."""

    decoder: Callable[[Sequence[int], int], Decoder]
    """Builds the decoder from the channels of the maps and the number of classes."""
    encoder: str
    """The ``model.arch`` of the classifier that is the encoder, and from whose weights it starts."""
    outputs: Outputs
    """The kind of the network's outputs."""
    dilated: bool = False
    widened: bool = False
    """See `Encoder`."""
    form: Callable[[bool], Form] | None = None
    """The encoder's layers, given whether its BatchNorm has fixed statistics; None: its classifier's."""
    task: Callable[[int], Task] | None = None
    """The task of these outputs, given the number of classes, where several tasks have such outputs."""
    drawing: bool = False
    """Whether it draws from its images' keys in training (`pfl_ext.models.dropout`)."""

    def __call__(self, num_labels: int, input_size: int) -> EncoderDecoder:
        """The network without pretrained weights; it is the same for any side of the input."""
        return self.build(num_labels, ModelConfig(input_size=input_size))

    def build(self, num_labels: int, config: ModelConfig) -> EncoderDecoder:
        """The network of a config."""
        form = None if self.form is None else self.form(config.has_fixed_statistics)
        encoder = Encoder(self.encoder, dilated=self.dilated, widened=self.widened, form=form)
        return EncoderDecoder(encoder, self.decoder(encoder.channels, num_labels))


def _registered(arch: str) -> Any:
    """The builder of a network of ours; None for one of torchvision's."""
    return NETWORKS[arch] if arch in NETWORKS.names() else None


def encoder_of(arch: str) -> str:
    """The classifier from whose weights a network starts; for a network without decoder, the network itself.

    The builder of a network with a decoder has it as ``encoder``, as `Architecture` does.
    """
    return str(getattr(_registered(arch), "encoder", arch))


def task_of(arch: str, usual: Callable[[int], Task]) -> Callable[[int], Task]:
    """A function that makes a network's task from the number of classes: its own, or else the usual one."""
    return getattr(_registered(arch), "task", None) or usual


def draws(config: ModelConfig) -> bool:
    """Whether a network draws in training, so that its images need keys."""
    return config.dropout or bool(getattr(_registered(config.arch), "drawing", False))


def new_in(arch: str) -> tuple[str, ...]:
    """The parameters that a network of one's own has beside those of its weights, such as prompts.

    Its builder has their names as ``new``, or those of modules, or patterns (`fnmatch`).
    """
    names: tuple[str, ...] = getattr(_registered(arch), "new", ())
    return names


def outputs_of(arch: str) -> Outputs:
    """The kind of a network's outputs; the builder of one with a decoder has it as ``outputs``."""
    found: Outputs = getattr(_registered(arch), "outputs", "image")
    return found
