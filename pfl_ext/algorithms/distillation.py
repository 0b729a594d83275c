"""Distillation between the two parts of a cut network: each learns from the other's logits.

Letters: B images of a batch, C channels, K classes, F numbers of an image's features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.parts import Part


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """``T^2 KL(softmax(teacher / T) || softmax(student / T))``, the mean over images.

    The factor T^2 keeps the size of the gradient about the same for every T (Hinton, Vinyals, Dean 2015,
    arXiv 1503.02531).

    Args:
        student: logits ``[B, K]`` of the network that learns.
        teacher: logits ``[B, K]`` of the same images.
        temperature: T.
    """
    p, q = (F.log_softmax(logits.float() / temperature, 1) for logits in (teacher, student))
    return temperature**2 * F.kl_div(q, p, reduction="batchmean", log_target=True)


def pooled(features: Tensor) -> Tensor:
    """The input of a client's classifier: means over positions ``[B, C]``, or flat features ``[B, F]``."""
    return features.mean((2, 3)) if features.ndim == 4 else features.flatten(1)


@dataclass(frozen=True)
class Shapes:
    """The shapes of one image's features and of a client's classifier ``[K, C]``, and K."""

    features: tuple[int, ...]
    classifier: tuple[int, int]
    outputs: int


@torch.no_grad()
def shapes_of(module: ImageClassifier, extractor: Part, server: Part) -> Shapes:
    """The shapes that the parts of a cut network have for one image."""
    blank = torch.zeros(1, *module.input_shape, device=module.mean.device)
    features = extractor(blank.contiguous(memory_format=module.memory_format))
    shape, inputs = tuple(features.shape[1:]), pooled(features).shape[1]
    outputs = server(features).shape[1]
    return Shapes(shape, (outputs, inputs), outputs)
