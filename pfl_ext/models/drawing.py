"""The initial weights of a network: the generator and the distributions that draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from pfl_ext.models.config import ModelConfig


class DrawFrom(TorchFunctionMode):
    """While active (in this thread), initialisers draw from ``generator`` instead of the global one."""

    _DRAWING = frozenset({"normal_", "uniform_", "random_", "bernoulli_", "rand", "randn", "randint"})

    def __init__(self, generator: torch.Generator):
        super().__init__()
        assert generator.device.type == "cpu"
        self._generator = generator

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "generator" in kwargs or getattr(func, "__name__", "") in self._DRAWING:
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)


def initialise(network: nn.Module, config: ModelConfig, generator: torch.Generator) -> None:
    """Draw those weights again for which ``config.init`` differs from torchvision; he, xavier keep biases."""
    if config.init == "keras":
        _initialise_as_keras(network, generator)
    for layer in network.modules():
        if not isinstance(layer, (nn.Conv2d, nn.Linear)):
            continue
        if config.init == "xavier":
            nn.init.xavier_uniform_(layer.weight, generator=generator)
        elif config.init == "he":
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)


@torch.no_grad()
def _initialise_as_keras(backbone: nn.Module, generator: torch.Generator) -> None:
    """Keras' he_normal for convolutions, glorot_uniform for linear layers, zero biases, norms 1 and 0."""
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            # Keras draws from a normal cut off at two standard deviations and widened to keep the variance.
            _truncated_normal(module.weight, math.sqrt(2 / fan_in) / 0.87962566103423978, generator)
        elif isinstance(module, nn.Linear):
            limit = math.sqrt(6 / (module.in_features + module.out_features))
            module.weight.uniform_(-limit, limit, generator=generator)
        elif isinstance(module, (_BatchNorm, nn.GroupNorm)) and module.affine:
            module.weight.fill_(1)
        else:
            continue
        if module.bias is not None:
            module.bias.zero_()


def _truncated_normal(out: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill ``out`` by the inverse distribution function, with one uniform for each weight."""
    edge = math.erf(math.sqrt(2))  # P(|x| < 2 standard deviations)
    uniform = torch.empty(out.shape, dtype=torch.float64).uniform_(-edge, edge, generator=generator)
    out.copy_(torch.erfinv(uniform) * (math.sqrt(2) * std))
