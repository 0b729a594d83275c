"""Matching of neurons between users' networks, which must be plain sequences of layers.

A neuron is an output of a linear layer or an output channel of a convolution, with its incoming weights and
its bias. If the neurons of a layer and the inputs of the next layer are permuted in the same way, the network
computes the same function.

Letters: J users, N neurons of a layer, D numbers of a neuron, C inputs of a layer, A numbers that the next
layer has for each input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from dataset.arrays import BoolArray, FloatArray, IntArray
from pfl_ext.algorithms.clients import Weights
from pfl_ext.models.dropout import KeyedDropout
from pfl_ext.tasks.ranking import Diverged

BETWEEN = (nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Identity, KeyedDropout)
"""Modules that may stand between two layers, since they treat all channels, or all units, in the same way."""
Places = IntArray
Neurons = FloatArray


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
        "fedma supports only plain networks (no norms, branches or frozen layers) that end in a linear "
        "layer: set model.arch to lenet, fedavg_cnn, simple_cnn, cifar_cnn or vgg9, and model.trained "
        "to all"
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


def neurons(weights: Weights, layer: Layer) -> Neurons:
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


def first_neurons(weights: Weights, layer: Layer, following: Layer, count: int) -> Weights:
    """The network with the layer's first ``count`` neurons; the others have weights of 0, in and out.

    With ReLU such an empty neuron has no gradient, so it stays empty.
    """
    changed = dict(weights)
    for name in layer.variables:
        changed[name] = weights[name].clone()
        changed[name][count:] = 0
    name = following.variables[0]
    weight = weights[name]
    inputs = weight.reshape(len(weight), layer.neurons, following.per_input).clone()
    inputs[:, count:] = 0
    changed[name] = inputs.reshape(weight.shape)
    return changed


def alive(neurons: Neurons) -> BoolArray:
    """``[N]``: which neurons are not empty, that is, have a number that is not 0."""
    return np.asarray((neurons != 0).any(1))


@dataclass(frozen=True)
class Belief:
    """The Beta-Bernoulli process that users' neurons are taken to come from."""

    sigma: float = 1.0
    """Standard deviation of users' weights around those of their global neuron."""
    sigma0: float = 1.0
    """Standard deviation of the global neurons' weights, whose mean is 0."""
    gamma: float = 1.0
    """Mass of the process: the larger, the more neurons that only some users have."""


def matched(users: Sequence[Neurons], passes: int, belief: Belief) -> list[Places]:
    """For each user, which of its neurons is global neuron i, as places ``[N]``.

    The first user's order is the start. Each further user is matched to the neurons of the users before it.
    Then each user is taken out and matched again, at most ``passes`` times or until nothing changes. Each
    time the Hungarian method finds the most likely places, given those of the other users (`_gains`).
    A user's empty neurons take the places that are left.

    Args:
        users: each user's neurons, ``[N, D]``.
        passes: most times that all users are matched again.
    """
    found = [np.arange(len(neurons)) for neurons in users]
    if len(users) == 1:
        return found
    total, holders = users[0].copy(), alive(users[0]).astype(np.int64)

    def place(user: int) -> None:
        neurons = users[user]
        gains = _gains(total, holders, neurons, len(users), belief)
        if not np.isfinite(gains).all():
            raise Diverged("a user's neurons are not finite", "lower local.learning_rate")
        found[user] = np.asarray(linear_sum_assignment(gains, maximize=True)[1], np.int64)
        count(user, 1)

    def count(user: int, sign: int) -> None:
        neurons = users[user][found[user]]
        total[:] += sign * neurons
        holders[:] += sign * alive(neurons)
        total[holders == 0] = 0  # without what rounding leaves

    for user in range(1, len(users)):
        place(user)
    for _ in range(passes):
        before = [places.copy() for places in found]
        for user in range(len(users)):
            count(user, -1)
            place(user)
        if all((places == old).all() for places, old in zip(found, before)):
            break
    return found


def _gains(total: Neurons, holders: Places, neurons: Neurons, num_users: int, belief: Belief) -> FloatArray:
    """``[N, N]``: twice the logarithm of how likely neuron v is at place i, up to a constant for each v.

    m_i of the J users have a neuron at place i, and these add up to S_i. With r = sigma^2 / sigma0^2 it is

        (|S_i + v|^2 / (r + m_i + 1) - |S_i|^2 / (r + m_i)) / sigma^2 + 2 log p,

    where p is m_i / (J - m_i), or gamma / (J j) for the j-th place that no user has. An empty neuron has 0
    at every place.

    Args:
        total: S, ``[N, D]``.
        holders: m, ``[N]``.
        neurons: the user's neurons v, ``[N, D]``.
        num_users: J, with this user.
    """
    variance, ratio = belief.sigma**2, (belief.sigma / belief.sigma0) ** 2
    taken, size = holders > 0, (total**2).sum(1)
    together = size[:, None] + 2 * total @ neurons.T + (neurons**2).sum(1)
    fits = together / (ratio + holders + 1)[:, None] - (size / (ratio + holders))[:, None]
    new = belief.gamma / num_users / np.maximum(np.cumsum(~taken), 1)
    odds = np.where(taken, holders / (num_users - holders), new)
    return np.where(alive(neurons), fits / variance + 2 * np.log(odds)[:, None], 0.0)


def mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean, computed in float64; ``shares`` add up to 1."""
    total = sum((share * tensor.double() for share, tensor in zip(shares, tensors)), tensors[0].double() * 0)
    return total.to(tensors[0].dtype)


def by_neuron(tensors: Sequence[Tensor], shares: FloatArray) -> Tensor:
    """The mean of users' tensors ``[N, ...]`` whose weights ``[J, N]`` are each neuron's own."""
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for weights, tensor in zip(torch.from_numpy(shares), tensors):
        total += tensor.double().cpu() * weights.view(-1, *[1] * (tensor.ndim - 1))
    return total.to(tensors[0])
