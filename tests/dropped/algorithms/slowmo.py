"""SlowMo: momentum of the server over rounds of local steps
(Wang et al. 2020, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
arXiv 1910.00643, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pfl.model.pytorch import PyTorchModel
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import Algorithm, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class SlowMoOptions:
    """The key of SlowMo."""

    beta: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the slow momentum that a round keeps."""


@register("slowmo")
class SlowMo(Algorithm[tuple[Weights, Weights]]):
    """The state is the model and its slow momentum."""

    options = SlowMoOptions
    idle = "server."

    def init(self, seed: int) -> tuple[Weights, Weights]:
        """The run's model, at rest."""
        self.clients = Clients(self.context)
        weights = self.clients.weights()
        return weights, {name: 0 * w for name, w in weights.items()}

    def round(
        self, state: tuple[Weights, Weights], number: int
    ) -> tuple[tuple[Weights, Weights], dict[str, Any]]:
        """``u <- beta u + mean update``, ``x <- x + u``."""
        x, u = state
        update, line = self.clients.mean_update(x, self.clients.cohort(number), number)
        u = {name: self.context.options.beta * u[name] + update[name] for name in u}
        return ({name: x[name] + u[name] for name in x}, u), line

    def model(self, state: tuple[Weights, Weights]) -> PyTorchModel:
        """The model."""
        return self.clients.model(state[0])

    def tensors(self, state: tuple[Weights, Weights]) -> dict[str, Tensor]:
        """Both."""
        return {f"{kind}/{name}": w for kind, ws in zip("xu", state) for name, w in ws.items()}

    def load(self, state: tuple[Weights, Weights], tensors: Mapping[str, Tensor]) -> tuple[Weights, Weights]:
        """Both."""
        x, u = ({n: tensors[f"{kind}/{n}"].to(w.device) for n, w in state[0].items()} for kind in "xu")
        return x, u
