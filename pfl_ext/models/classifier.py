"""Image networks for private federated training, in the form that pfl's PyTorchModel takes.

A BatchNorm with running statistics cannot be used with privacy: its statistics mix the images of a batch and
are not part of the update. It becomes GroupNorm (from scratch), or its pretrained statistics are frozen.

Shape letters: B images of a batch, H x W their stored size, S the side of the network's input, K labels.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.models as zoo
from pfl.metrics import MetricValue, Weighted
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfl_ext.data.mixing import is_mixed, mixed
from pfl_ext.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Framing, Padding, normalise
from pfl_ext.models.checks import check_known, check_last_layer, check_own_parameters, check_size, wrong_side
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.decoders import Architecture, EncoderDecoder, new_in, taught
from pfl_ext.models.depths import Depths
from pfl_ext.models.drawing import DrawFrom, initialise
from pfl_ext.models.dropout import DROPPING, dropping, keyed, leave_out_of_attention, left_out, without_keys
from pfl_ext.models.image_changes import ImageChanges
from pfl_ext.models.parties import PartyNetworks
from pfl_ext.models.random_features import OnRandomFeatures, RandomFeatures
from pfl_ext.models.small import NETWORKS, Configured
from pfl_ext.models.standardised import Standardised, standardised_in
from pfl_ext.models.trained import Bottleneck, choose_trained, head_of, part_of_classes
from pfl_ext.models.weights import load_weights, read_weights
from pfl_ext.tasks.task import Task


class FrozenStatisticsBatchNorm2d(nn.Module):
    """BatchNorm with given statistics (buffers) and trainable scale and shift.

    It computes ``nn.BatchNorm2d`` in eval mode, in any mode: ``train()`` changes nothing and forward writes
    nothing.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` -> the same shape."""
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


def build_backbone(
    config: ModelConfig, num_labels: int, generator: Generator, weights: str | Path | None = None
) -> nn.Module:
    """A classifier without live BatchNorm, on the CPU.

    All draws come from ``generator`` and are the same for any ``weights``. Random features are a function of
    its initial seed, or with ``config.keep_head`` those of the file. Dropout and stochastic depth would draw
    from the global generator during training. They are left out, or with ``config.dropout`` replaced by
    `pfl_ext.models.dropout`.

    Args:
        config: the network, which must have one output in training. A GroupNorm's eps is 1e-5. Hsu et al.
            2020 have a bottleneck of 64 for Landmarks (Section 6.5, which names no activation; here is none).
        num_labels: K, the number of outputs.
        generator: a generator on the CPU.
        weights: None for weights as drawn; "imagenet"; or a file of this architecture (``.pth``, ``.pt``,
            ``.safetensors``): torchvision's, or a run's ``model.safetensors``. The head is new unless
            ``config.keep_head``. With a decoder the file may be its encoder's.

    Raises:
        ValueError: when a name or a file does not fit.
    """
    if num_labels < 1:
        raise ValueError(f"num_labels is {num_labels}: a classifier has at least 1")
    if config.bottleneck is not None and config.keep_head:
        raise ValueError("model.keep_head is true, but model.bottleneck makes a new head: set it to none")
    arch = config.arch
    if config.parties is not None:
        return _of_parties(config, num_labels, generator, weights)
    with DrawFrom(generator):
        backbone = _untrained(config, num_labels)
    if getattr(backbone, "aux_logits", False):
        raise ValueError(f"{arch} has auxiliary outputs, which are not supported; choose another")
    initialise(backbone, config, generator)
    _replace_norms_and_dropout(backbone, config)
    if config.channel_norm == "data" and standardised_in(backbone) is None:
        raise ValueError(f"model.channel_norm is data, but {arch} has no norm for it: set it to group")
    ran = check_size(backbone, arch, config.input_size, num_labels)
    check_last_layer(backbone, config, num_labels, ran)
    check_own_parameters(backbone, config)
    place, of_classes = head_of(backbone)[0], part_of_classes(backbone)
    if config.random_features is not None:
        _insert_random_features(backbone, config, config.random_features, generator)
    if weights is not None:
        head = None if config.keep_head else of_classes
        load_weights(backbone, head, arch, *read_weights(arch, weights), new_in(arch))
        last = backbone.get_submodule(place)
        if isinstance(last, OnRandomFeatures):
            last.random.check_width(config.random_features_width)
    if config.bottleneck is not None:
        _insert_bottleneck(backbone, config, config.bottleneck, generator)
    choose_trained(backbone, config, generator)
    return backbone


def _replace_norms_and_dropout(backbone: nn.Module, config: ModelConfig) -> None:
    """Give a network layers of which neither batches nor the global generator change the outputs."""
    if isinstance(backbone, EncoderDecoder):  # no file has statistics of the decoder
        _replace(backbone.decoder, _BatchNorm, lambda bn: _group_norm(bn, config))
    _replace(backbone, _BatchNorm, lambda bn: _replacement(bn, config))
    number, drops = itertools.count(), any(isinstance(it, DROPPING) and it.p for it in backbone.modules())
    _replace(backbone, DROPPING, lambda it: keyed(it, next(number)) if config.dropout else left_out(it))
    if not config.dropout:
        leave_out_of_attention(backbone)
    elif not drops:
        raise ValueError(
            f"model.dropout is true, but {config.arch} has no dropout: set model.dropout to false"
        )
    assert_no_live_batchnorm(backbone)


def _of_parties(
    config: ModelConfig, num_labels: int, generator: Generator, weights: str | Path | None
) -> nn.Module:
    """A network for each party, drawn one after another; ``weights`` is a file with all of them."""
    alone = replace(config, parties=None, input_size=config.input_size // 2)
    each = [build_backbone(alone, num_labels, generator) for _ in range(config.parties or 0)]
    arch = f"{config.arch} for {len(each)} parts"
    check_size(together := PartyNetworks(each), arch, config.input_size, num_labels)
    if weights is not None:
        load_weights(together, None, config.arch, *read_weights(config.arch, weights))
    return together


def _untrained(config: ModelConfig, num_labels: int) -> nn.Module:
    arch = config.arch
    if arch in NETWORKS.names():
        network = NETWORKS[arch]
        if isinstance(network, Configured | Architecture):
            return network.build(num_labels, config)
        return network(num_labels, config.input_size)
    check_known(arch)
    shape = {"image_size": config.input_size} if arch.startswith("vit_") else {}
    try:
        return cast(nn.Module, zoo.get_model(arch, weights=None, num_classes=num_labels, **shape))
    except AssertionError as fault:  # the side is no multiple of the patch size
        raise wrong_side(arch, config.input_size, fault) from fault


def _insert_bottleneck(backbone: nn.Module, config: ModelConfig, units: int, generator: Generator) -> None:
    """Replace the head by two newly drawn linear layers."""
    name, head = head_of(backbone)
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{config.arch} ends in a convolution, before which there is no bottleneck; leave it out"
        )
    with DrawFrom(generator):
        both = Bottleneck(nn.Linear(head.in_features, units), nn.Linear(units, head.out_features))
    initialise(both, config, generator)
    backbone.set_submodule(name, both)


def _insert_random_features(
    backbone: nn.Module, config: ModelConfig, outputs: int, generator: Generator
) -> None:
    """Replace the head by a newly drawn one on random features."""
    name, head = head_of(backbone)
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{config.arch} ends in a convolution, which takes no random features; leave "
            "model.random_features out"
        )
    width, seed = config.random_features_width, generator.initial_seed()
    random = RandomFeatures(head.in_features, outputs, width, seed)
    with DrawFrom(generator):
        linear = nn.Linear(outputs, head.out_features)
    initialise(linear, config, generator)
    backbone.set_submodule(name, OnRandomFeatures(random, linear))


def _replacement(bn: _BatchNorm, config: ModelConfig) -> nn.Module:
    channels = bn.num_features
    if config.channel_norm == "data" and not bn.affine:
        return Standardised(channels)
    if config.has_fixed_statistics:
        frozen = FrozenStatisticsBatchNorm2d(channels, bn.eps)
        given = {name: tensor for name, tensor in bn.state_dict().items() if tensor.ndim}
        frozen.load_state_dict({**frozen.state_dict(), **given})
        return frozen
    return _group_norm(bn, config)


def _group_norm(bn: _BatchNorm, config: ModelConfig) -> nn.GroupNorm:
    channels = bn.num_features
    divisor = next(g for g in range(min(config.groups, channels), 0, -1) if channels % g == 0)
    group = nn.GroupNorm(divisor, channels, eps=1e-5, affine=bn.affine)
    if bn.affine:
        group.load_state_dict({"weight": bn.weight, "bias": bn.bias})
    return group


def _replace(
    module: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...], by: Callable[[Any], nn.Module]
) -> None:
    for name, child in module.named_children():
        if isinstance(child, kind):
            setattr(module, name, replacement := by(child))
            for key, parameter in child.named_parameters():  # what a network froze itself stays frozen
                replacement.get_parameter(key).requires_grad_(parameter.requires_grad)
        else:
            _replace(child, kind, by)


def assert_no_live_batchnorm(module: nn.Module) -> None:
    """Fail if a layer of ``module`` would change running statistics or mix the images of a batch."""
    live = [name for name, child in module.named_modules() if isinstance(child, _BatchNorm)]
    assert not live, f"live BatchNorm at {', '.join(live)}"


NO_CHANGES = ImageChanges()
RATE_FACTOR = "rate_factor"
"""Key in an optimiser's parameter group: the group's learning rate relative to the others'."""


class ImageClassifier(nn.Module):
    """A backbone with the image transform on the device: it takes uint8 images and returns a task's outputs.

    pfl's PyTorchModel trains it: pfl calls ``loss(*batch)`` and ``metrics(*batch)`` on batches (images,
    targets, crops). Training and evaluation mode are the same, and forward changes no state.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        task: Task,
        input_size: int,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        exact_crops: bool | None = None,
        padding: Padding = "zero",
        changes: ImageChanges = NO_CHANGES,
    ):
        """``exact_crops`` and ``padding``: see `pfl_ext.data.transforms.cropped`.

        ``exact_crops`` is True where crop is "crop". The input is ``(pixels - mean) / std`` of pixels in
        0..1. ``changes`` are those of training images. ``task`` defines the outputs' meaning, the loss and
        the score.
        """
        super().__init__()
        assert_no_live_batchnorm(backbone)
        changes.check_task(task)
        self.noted: list[tuple[Tensor, int]] | None = None  # if a list, gets each batch's loss and size
        self.backbone = backbone
        self.depths = Depths.of_network(backbone)  # while its layers still have their own types
        self.framing = Framing(input_size, exact_crops, padding)
        self.task, self.changes = task, changes
        self.cropping: Callable[[Tensor, Tensor], Tensor | None] | None = None
        """The engine's function from images and crops to the backbone's input; it may return None."""
        self.is_plain = tuple(mean) == (0, 0, 0) and tuple(std) == (1, 1, 1)
        self.register_buffer("mean", torch.tensor(tuple(mean)), persistent=False)
        self.register_buffer("std", torch.tensor(tuple(std)), persistent=False)

    @property
    def input_size(self) -> int:
        """S, the side of the network's input in pixels."""
        return self.framing.input_size

    @torch.no_grad()
    def prepare(self, images: Tensor, targets: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The backbone's input ``[B, 3, S, S]`` and the targets that belong to it.

        Args:
            images: uint8 ``[B, H, W, 3]``.
            targets: the targets of these images.
            crops: ``[B, 6]`` or more (`pfl_ext.data.transforms`); None takes the whole images. Where they say
                how images are mixed, the targets are mixed already (`pfl_ext.data.mixing`).
        """
        x = None if self.cropping is None or crops is None else self.cropping(images, crops)
        if x is None:
            pixels, targets = self.task.augment(images, targets, crops, self.framing)
            x = self._normalised(self.changes.pixels(pixels, crops))
        x = mixed(self.changes.inputs(x, crops, self.std), crops)
        return x.contiguous(memory_format=self.memory_format), targets

    def _normalised(self, pixels: Tensor) -> Tensor:
        """Normalised pixels in the weights' memory format; another would cost a CPU a third of a step."""
        if not self.is_plain:
            pixels = normalise(pixels, self.mean, self.std)
        return pixels.contiguous(memory_format=self.memory_format)

    def rate_groups(
        self, rate: float, head_rate_factor: float, layer_decay: float = 1.0
    ) -> list[dict[str, Any]]:
        """The trained parameters for an optimiser, a group for each learning rate.

        Args:
            rate: learning rate of all layers but the head (decoder, bottleneck and last layer).
            head_rate_factor: the head's learning rate relative to ``rate``.
            layer_decay: learning rate of a block divided by that of the next one (`Depths`).
        """
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.backbone.named_parameters():
            if parameter.requires_grad:
                factor = self.depths.rate_factor(name, head_rate_factor, layer_decay)
                groups.setdefault(factor, []).append(parameter)
        return [
            {"params": of_it, **({} if factor == 1 else {"lr": rate * factor, RATE_FACTOR: factor})}
            for factor, of_it in groups.items()
        ]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of the backbone's input for one image."""
        return (3, self.input_size, self.input_size)

    @property
    def trained_part(self) -> nn.Module:
        """The layers that run in training."""
        return self.backbone

    @property
    def memory_format(self) -> torch.memory_format:
        """Format of the first convolution's weights; ``to(memory_format=torch.channels_last)`` changes it."""
        weight = next((p for p in self.backbone.parameters() if p.ndim == 4), None)
        return torch.contiguous_format if weight is None else memory_format(weight)

    def forward(self, images: Tensor, crops: Tensor | None = None) -> Tensor:
        """Outputs for uint8 images ``[B, H, W, 3]``; without ``crops``, after the evaluation transform."""
        with torch.no_grad():
            x = self._normalised(self.task.pixels(images, crops, self.framing))
        return cast(Tensor, self.backbone(x))

    def outputs(self, images: Tensor, targets: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs of a batch and the targets to compare them with; arguments as for `prepare`.

        With crops, dropout uses the keys in them, and detectors have access to their targets (`taught`).
        """
        x, targets = self.prepare(images, targets, crops)
        with dropping(crops), taught(None if crops is None else targets):
            return self.backbone(x), targets

    def loss(self, images: Tensor, targets: Tensor, crops: Tensor | None = None) -> Tensor:
        """The task's loss of a batch."""
        loss = self.task.loss(*self.outputs(images, targets, crops))
        if self.noted is not None:
            self.noted.append((loss.detach().clone(), len(images)))  # pfl adds to its loss in place
        return loss

    @torch.no_grad()
    def metrics(self, images: Tensor, targets: Tensor, crops: Tensor | None = None) -> dict[str, MetricValue]:
        """The scored ``loss`` as a pfl metric that adds up over batches, users and workers."""
        assert not is_mixed(crops), "scores are of images and labels that are not mixed"
        x, targets = self.prepare(images, targets, without_keys(crops))
        losses, _ = self.task.scored(self.backbone(x), targets)
        return {"loss": Weighted(float(losses.sum()), len(images))}


def memory_format(weight: Tensor) -> torch.memory_format:
    """The memory format of a tensor with four dimensions."""
    return torch.contiguous_format if weight.is_contiguous() else torch.channels_last


@torch.no_grad()
def probe_checksum(model: ImageClassifier) -> str:
    """SHA-256 of the logits of two synthetic images (to 3 decimals) and of the number of parameters.

    It is kept in run records to show a changed initialisation, weights file, normalisation or layer. Compare
    it only on one kind of hardware: kernels differ in the last bits, which rounding can turn into a digit.
    """
    shape = (2, model.input_size, model.input_size, 3)
    mixed = np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(13)
    images = torch.from_numpy(mixed.astype(np.uint8).reshape(shape)).to(model.mean.device)
    logits = model(images).double().cpu().numpy().round(3) + 0.0  # no negative zeros
    digest = hashlib.sha256(np.ascontiguousarray(logits).tobytes())
    digest.update(str(sum(p.numel() for p in model.parameters())).encode())
    return digest.hexdigest()
