"""Small networks of federated learning's papers that torchvision lacks, built by `pfl_ext.models.classifier`.

A new network is one file in this folder, with a function under ``@NETWORKS.register("name")``.

Shape letters: B images of a batch, S side of the input, K labels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from pfl_ext.models.config import ModelConfig
from pfl_ext.registry import Registry


@dataclass(frozen=True)
class Configured:
    """A network that reads keys of ``model`` that others do not read."""

    build: Callable[[int, ModelConfig], nn.Module]
    """Builds the network from the number of labels and the section, with torch's random weights."""
    reads: tuple[str, ...]
    """The keys of ``model`` that only such networks read."""

    def __call__(self, num_labels: int, input_size: int) -> nn.Module:
        """The network with those keys at their defaults."""
        return self.build(num_labels, ModelConfig(input_size=input_size))


Network = Callable[[int, int], nn.Module]
"""Builds a network from the number of labels and the side of the input, with torch's random weights."""
NETWORKS: Registry[Network] = Registry("pfl_ext.models", "model.arch")
"""The networks that ``model.arch`` chooses by name, besides torchvision's classifiers."""


def network_keys() -> dict[str, list[str]]:
    """Each key of ``model`` that only some networks read, and their names."""
    found: dict[str, list[str]] = {}
    for name in NETWORKS.names():
        network = NETWORKS[name]
        for key in network.reads if isinstance(network, Configured) else ():
            found.setdefault(key, []).append(name)
    return found


def _convolutional(channels: Sequence[int], padding: int, flat: int, units: Sequence[int]) -> nn.Sequential:
    """5 x 5 convolutions, each before a 2 x 2 max-pooling, then linear layers, ReLU between."""
    layers: list[tuple[str, nn.Module]] = []
    for k, (before, after) in enumerate(pairwise((3, *channels)), 1):
        layers += [
            (f"conv{k}", nn.Conv2d(before, after, 5, padding=padding)),
            (f"relu{k}", nn.ReLU(inplace=True)),
            (f"pool{k}", nn.MaxPool2d(2)),
        ]
    layers.append(("flatten", nn.Flatten()))
    for k, (before, after) in enumerate(pairwise((flat, *units)), 1):
        layers += [
            (f"fc{k}", nn.Linear(before, after)),
            (f"relu{len(channels) + k}", nn.ReLU(inplace=True)),
        ]
    return nn.Sequential(OrderedDict(layers[:-1]))


def _unpadded_side(name: str, input_size: int) -> int:
    """The side that two unpadded 5 x 5 convolutions, each before a 2 x 2 max-pooling, leave of an image."""
    side = ((input_size - 4) // 2 - 4) // 2
    if side < 1:
        raise ValueError(f"input_size is {input_size}, but {name} leaves nothing of that: use at least 16")
    return side


@NETWORKS.register("cifar_cnn")
def cifar_cnn(num_labels: int, input_size: int) -> nn.Sequential:
    """The CIFAR network of Hsu, Qi and Brown 2020 (Section 6.5), ``[B, 3, S, S]`` -> ``[B, K]``.

    Two 5 x 5 convolutions of 64 channels, each before a 2 x 2 max-pooling, then 384, 192 and K units, ReLU
    between. The paper leaves the padding open: here outputs are as large as inputs, as in TensorFlow's CIFAR
    tutorial from which these widths come; 1.76 million parameters for S = 32 and K = 10.
    """
    if input_size < 4:
        raise ValueError(f"input_size is {input_size}, but cifar_cnn halves the image twice: use at least 4")
    return _convolutional((64, 64), 2, 64 * (input_size // 2 // 2) ** 2, (384, 192, num_labels))


@NETWORKS.register("lenet")
def lenet(num_labels: int, input_size: int) -> nn.Sequential:
    """The CNN of NIID-Bench (Li et al. 2022, arXiv 2102.02079), ``[B, 3, S, S]`` -> ``[B, K]``.

    Two 5 x 5 convolutions of 6 and 16 channels without padding, each before a 2 x 2 max-pooling, then 120, 84
    and K units, ReLU between; 62,006 parameters for S = 32 and K = 10.
    """
    side = _unpadded_side("lenet", input_size)
    return _convolutional((6, 16), 0, 16 * side**2, (120, 84, num_labels))


@NETWORKS.register("moon_cnn")
def moon_cnn(num_labels: int, input_size: int) -> nn.Sequential:
    """The CIFAR-10 network of MOON (Li, He and Song 2021, arXiv 2103.16257), ``[B, 3, S, S]`` -> ``[B, K]``.

    `lenet` up to its 84 units, then the projection head, 84 and 256 units with a ReLU between them, then K
    units. No ReLU follows the 256. 92,626 parameters for S = 32 and K = 10.
    """
    side = _unpadded_side("moon_cnn", input_size)
    network = _convolutional((6, 16), 0, 16 * side**2, (120, 84, 84, 256, num_labels))
    del network.relu6
    return network


@NETWORKS.register("fedavg_cnn")
def fedavg_cnn(num_labels: int, input_size: int) -> nn.Sequential:
    """The CNN of PFLlib (Zhang et al. 2023, arXiv 2312.04992), ``[B, 3, S, S]`` -> ``[B, K]``.

    Two 5 x 5 convolutions of 32 and 64 channels without padding, each before a 2 x 2 max-pooling, then 512
    and K units, ReLU between; 878,538 parameters for S = 32 and K = 10.
    """
    side = _unpadded_side("fedavg_cnn", input_size)
    return _convolutional((32, 64), 0, 64 * side**2, (512, num_labels))


@NETWORKS.register("fedrep_cnn")
def fedrep_cnn(num_labels: int, input_size: int) -> nn.Sequential:
    """The CIFAR-10 network of FedRep (Collins et al. 2021, arXiv 2102.07078), ``[B, 3, S, S]`` -> ``[B, K]``.

    Two 5 x 5 convolutions of 64 channels without padding, each before a 2 x 2 max-pooling, then 120, 64 and K
    units, ReLU between; 307,842 parameters for S = 32 and K = 10.
    """
    side = _unpadded_side("fedrep_cnn", input_size)
    return _convolutional((64, 64), 0, 64 * side**2, (120, 64, num_labels))


@NETWORKS.register("simple_cnn")
def simple_cnn(num_labels: int, input_size: int) -> nn.Sequential:
    """The CNN of pfl-research's CIFAR-10 benchmark, ``[B, 3, S, S]`` -> ``[B, K]``.

    Two 3 x 3 convolutions of 32 and 64 channels without padding, a 2 x 2 max-pooling, then 128 and K units,
    ReLU between; dropout of 0.25 after the pooling and of 0.5 before the last layer. 1,626,442 parameters for
    S = 32 and K = 10. pfl draws its weights by ``model.init: xavier``.
    """
    side = (input_size - 4) // 2
    if side < 1:
        raise ValueError(f"input_size is {input_size}, but simple_cnn leaves nothing of that: use at least 6")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 32, 3),
            relu1=nn.ReLU(inplace=True),
            conv2=nn.Conv2d(32, 64, 3),
            relu2=nn.ReLU(inplace=True),
            pool=nn.MaxPool2d(2),
            dropout1=nn.Dropout(0.25),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * side**2, 128),
            relu3=nn.ReLU(inplace=True),
            dropout2=nn.Dropout(0.5),
            fc2=nn.Linear(128, num_labels),
        )
    )


@NETWORKS.register("vgg9")
def vgg9(num_labels: int, input_size: int) -> nn.Sequential:
    """The VGG-9 of FedMA (Wang et al. 2020, arXiv 2002.06440), ``[B, 3, S, S]`` -> ``[B, K]``.

    Three pairs of padded 3 x 3 convolutions (32 and 64, 128 and 128, 256 and 256 channels), each pair before
    a 2 x 2 max-pooling, then 512, 512 and K units, ReLU between and no norms; dropout of channels, 0.05,
    after the second pair, and of 0.1 before the first and the last linear layer. 3,491,530 parameters for
    S = 32 and K = 10.
    """
    side = input_size // 8
    if side < 1:
        raise ValueError(f"input_size is {input_size}, but vgg9 halves the image three times: use at least 8")
    layers: list[nn.Module] = []
    for pair, (before, middle, after) in enumerate(((3, 32, 64), (64, 128, 128), (128, 256, 256))):
        for inputs, outputs in ((before, middle), (middle, after)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(2))
        layers += [nn.Dropout2d(0.05)] if pair == 1 else []
    layers += [nn.Flatten(), nn.Dropout(0.1), nn.Linear(256 * side**2, 512), nn.ReLU(inplace=True)]
    layers += [nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(512, num_labels)]
    return nn.Sequential(*layers)
