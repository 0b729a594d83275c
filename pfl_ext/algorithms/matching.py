"""Matching of neurons between users' networks, which must be plain sequences of layers.

A neuron is an output of a linear layer or an output channel of a convolution, with its incoming weights and
its bias. If the neurons of a layer and the inputs of the next layer are permuted in the same way, the network
computes the same function.

Letters: J users, N neurons of a layer, D numbers of a neuron, C inputs of a layer, A numbers that the next
layer has for each input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from pfl_ext.algorithms.clients import Weights
from pfl_ext.models.dropout import KeyedDropout

BETWEEN = (nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Identity, KeyedDropout)
"""Modules that may stand between two layers, since they treat all channels, or all units, in the same way."""
Places = npt.NDArray[np.int64]


class Layer(NamedTuple):
    """A layer that is matched."""

    name: str
    """Name of the module within the network."""
    neurons: int
    """N."""
    per_input: int
    """A: pixels of a channel after a flattened map, kernel taps for a convolution, else 1."""
    variables: tuple[str, ...]
    """Names of its weights and, where it has one, of its bias."""


def layers_of(network: nn.Module, prefix: str) -> list[Layer]:
    """The layers of a plain network from the first to the last.

    Args:
        network: a sequence of convolutions and linear layers, with modules of `BETWEEN` between them.
        prefix: prefix of the names of its variables.

    Raises:
        ValueError: one line, for any other network.
    """
    refusal = (
        "fedma matches the neurons of plain networks, without norms, branches or frozen layers, which end in "
        "a linear layer: set model.arch to lenet, simple_cnn, cifar_cnn or vgg9, and model.trained to all"
    )
    if not isinstance(network, nn.Sequential):
        raise ValueError(refusal)
    found: list[Layer] = []
    for name, child in network.named_children():
        if isinstance(child, BETWEEN):
            continue
        whole = isinstance(child, nn.Linear) or (isinstance(child, nn.Conv2d) and child.groups == 1)
        if not whole or not all(p.requires_grad for p in child.parameters()):
            raise ValueError(refusal)
        weight = child.get_parameter("weight")
        inputs = found[-1].neurons if found else weight.shape[1]
        named = tuple(f"{prefix}{name}.{variable}" for variable, _ in child.named_parameters())
        found.append(Layer(name, len(weight), weight[0].numel() // inputs, named))
    last = network[-1] if len(network) else None
    if len(found) < 2 or not isinstance(last, nn.Linear):
        raise ValueError(refusal)
    return found


def neurons(weights: Weights, layer: Layer) -> npt.NDArray[np.float64]:
    """``[N, D]``: each neuron's incoming weights, then its bias."""
    parts = [weights[name].detach().double().cpu().numpy() for name in layer.variables]
    return np.concatenate([part.reshape(layer.neurons, -1) for part in parts], 1)


def reordered(weights: Weights, layer: Layer, following: Layer, places: Places) -> Weights:
    """The same network with the layer's neuron ``places[i]`` and the next layer's input for it at place i."""
    changed = dict(weights)
    for name in layer.variables:
        changed[name] = weights[name][places]
    name = following.variables[0]
    weight = weights[name]
    inputs = weight.reshape(len(weight), layer.neurons, following.per_input)
    changed[name] = inputs[:, places].reshape(weight.shape)
    return changed


def matched(users: Sequence[npt.NDArray[np.float64]], passes: int) -> list[Places]:
    """For each user, which of its neurons is global neuron i, as places ``[N]``.

    The first user's order is the start. Each further user is matched to the sums S_i of the neurons that the
    users before it have at place i: the Hungarian method maximises the sum over i of ``S_i . v_place(i)``.
    Then each user is taken out and matched again, at most ``passes`` times or until nothing changes. The sum
    of squared norms of all S_i never falls.

    Args:
        users: each user's neurons, ``[N, D]``.
        passes: most times that all users are matched again.
    """
    size = len(users[0])
    found = [np.arange(size)]
    total = users[0].copy()
    for own in users[1:]:
        found.append(_assigned(total, own))
        total += own[found[-1]]
    for _ in range(passes):
        changed = False
        for user, own in enumerate(users):
            total -= own[found[user]]
            places = _assigned(total, own)
            total += own[places]
            changed |= bool((places != found[user]).any())
            found[user] = places
        if not changed:
            break
    return found


def _assigned(total: npt.NDArray[np.float64], own: npt.NDArray[np.float64]) -> Places:
    _, places = linear_sum_assignment(total @ own.T, maximize=True)
    return np.asarray(places, np.int64)


def mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean, computed in float64; ``shares`` add up to 1."""
    total = sum((share * tensor.double() for share, tensor in zip(shares, tensors)), tensors[0].double() * 0)
    return total.to(tensors[0].dtype)
