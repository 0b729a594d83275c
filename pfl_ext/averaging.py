"""An average of models over rounds or epochs, which is scored and saved in the place of the last model.

With x_t the server's model after t rounds (in centralised training, the model after t epochs), and s the
first round of the average (``average_from_round``), the average is a_s = x_s, and then

    a_t = d_n a_(t-1) + (1 - d_n) x_t,    n = t - s,

where n is the number of models in a_(t-1). Before round s the model is x_t itself. With ``average_every`` c,
only x_s, x_(s+c), x_(s+2c), ... are added, and n = (t - s) / c. d_n is

* n / (n + 1) for ``swa``: the plain mean of x_s, ..., x_t (Izmailov et al. 2018, arXiv 1803.05407; in
  federated learning Caldarola, Caputo and Ciccone 2022, arXiv 2203.11834, from three quarters of the rounds);
* min(decay, n / (n + 9)) for ``ema``, the exponential moving average that De et al. (2022, arXiv 2204.13650)
  use in private training. The second number is the warm-up of their code (jax_privacy). It gives x_t at least
  9 / (n + 9) of the weight, so that the first models are soon forgotten, however close to 1 the decay is.

Training does not depend on the average: it always goes on from x_t. It costs no privacy, since it is
computed from models that the server has anyway, and nothing is sent for it.

What is averaged are the variables that training changes. Nothing else of a network changes from round to
round: frozen layers and statistics of norms are those of a file, or fixed before the first round. So there is
no rule for buffers. (torch's ``AveragedModel`` takes them from the last model, which would be the same.)

Adapters of which both parts are trained are averaged as what they add to their layer, because the mean of the
products ``B A`` is not the product of the means. Its rank may be higher than an adapter's. So where the
average is in place, it is part of the layer's frozen weights, and B is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from pfl_ext.configs import STRICT, Fraction
from pfl_ext.models.lora import adapted
from pfl_ext.models.lora_layers import Adapter

WARM_UP = 9
"""Part of the exponential average's formula, by De et al.'s code and TensorFlow: (1 + t) / (10 + t)."""


@dataclass(frozen=True, config=STRICT)
class AveragingConfig:
    """Which average of the models after rounds or epochs is scored and saved."""

    average: Literal["none", "ema", "swa"] = "none"
    """Score and save an average of all rounds' (epochs') models: exponential (ema), plain (swa); none: no."""
    average_decay: Fraction = 0.99
    """Weight of the average so far when a model is added to it (ema); less in early rounds or epochs."""
    average_from_round: NonNegativeInt = 0
    """First round or epoch whose model is averaged, 0: the initial one; before, no average is scored."""
    average_every: PositiveInt = 1
    """Rounds or epochs from one model that is averaged to the next, as of a cycle of a cyclic schedule."""

    def weight_of_average(self, n: int) -> float:
        """d_n, the weight of an average of n >= 1 models where the next one is added."""
        if self.average == "swa":
            return n / (n + 1)
        return min(self.average_decay, n / (n + WARM_UP))


class ModelAverage:
    """The average of a module over rounds or epochs, in the type and on the device of its parameters.

    Where the config asks for no average, and before its first round, it is empty and changes nothing.

    Args:
        config: which average.
        module: has the model's weights whenever a method is called.
        unit: what a model is the result of.
    """

    def __init__(
        self, config: AveragingConfig, module: nn.Module, unit: Literal["round", "epoch"] = "round"
    ) -> None:
        self.config, self._module, self._unit = config, module, unit
        self._weights: dict[str, Tensor] = {}

    def __str__(self) -> str:
        config = self.config
        of = {"swa": "plain average", "ema": f"exponential moving average (decay {config.average_decay:g})"}
        start = f" from {self._unit} {config.average_from_round} on" if config.average_from_round else ""
        each = f"{config.average_every} {self._unit}s" if config.average_every > 1 else self._unit
        return (
            f"what is scored and saved{start} is the {of[config.average]} of the models after each {each}; "
            "training does not depend on it"
        )

    def _merged(self) -> dict[str, tuple[Tensor, Adapter]]:
        """The adapters that are averaged as what they add to their layer, with its frozen weights."""
        return {
            f"{name}.base.weight": (weight, adapter)
            for name, weight, adapter in adapted(self._module)
            if adapter.lora_a.weight.requires_grad
        }

    def _places(self, merged: Mapping[str, tuple[Tensor, Adapter]]) -> dict[str, Tensor]:
        """What the average replaces of the module, under the average's own names."""
        parts = {id(part.weight) for _, each in merged.values() for part in (each.lora_a, each.lora_b)}
        trained = {n: p for n, p in self._module.named_parameters() if p.requires_grad and id(p) not in parts}
        return {**trained, **{name: weight for name, (weight, _) in merged.items()}}

    def _current(self) -> dict[str, Tensor]:
        """What is averaged of the module as it is."""
        merged = self._merged()
        places = self._places(merged)
        for name, (weight, adapter) in merged.items():
            places[name] = (weight.double() + adapter.added()).to(weight.dtype)
        return places

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Add the module, which has had ``step`` updates. Must be called after each round or epoch, once."""
        n, between = divmod(step - self.config.average_from_round, self.config.average_every)
        if self.config.average == "none" or n < 0 or between:
            return
        current = self._current()
        if n == 0:
            self._weights = {name: tensor.detach().clone() for name, tensor in current.items()}
            return
        kept = self.config.weight_of_average(n)
        for name, tensor in current.items():
            self._weights[name].mul_(kept).add_(tensor, alpha=1 - kept)

    @torch.no_grad()
    def put(self) -> None:
        """Set the module to the average."""
        if self._weights:
            merged = self._merged()
            for name, place in self._places(merged).items():
                place.copy_(self._weights[name])
            for _, adapter in merged.values():
                adapter.lora_b.weight.zero_()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the module has the weights of the average; afterwards its own again, bit for bit."""
        if not self._weights:
            yield
            return
        merged = self._merged()
        places = [*self._places(merged).values(), *(each.lora_b.weight for _, each in merged.values())]
        before = [place.detach().clone() for place in places]
        self.put()
        try:
            yield
        finally:
            with torch.no_grad():
                for place, tensor in zip(places, before):
                    place.copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """The average, for a checkpoint."""
        return dict(self._weights)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the average of a checkpoint, with the memory format of the parameters.

        In another format, torch may round in another order.
        """
        places = self._places(self._merged())
        self._weights = {
            name: torch.empty_like(places[name], requires_grad=False).copy_(tensor)
            for name, tensor in tensors.items()
        }
