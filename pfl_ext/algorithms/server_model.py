"""Base of algorithms that have no state but the server's model and its optimiser."""

from __future__ import annotations

from collections.abc import Mapping

from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import Algorithm


class ServerModelAlgorithm(Algorithm[PyTorchModel]):
    """An algorithm whose rounds change the run's model, and whose checkpoint holds nothing else."""

    def init(self, seed: int) -> PyTorchModel:
        """The run's model, whose weights were drawn from the run's seed."""
        return self.context.model

    def model(self, state: PyTorchModel) -> PyTorchModel:
        """The state itself."""
        return state

    def tensors(self, state: PyTorchModel) -> dict[str, Tensor]:
        """The tensors of the model and the server's optimiser."""
        return checkpoint.model_tensors(state)

    def load(self, state: PyTorchModel, tensors: Mapping[str, Tensor]) -> PyTorchModel:
        """Restore the model and the server's optimiser."""
        checkpoint.restore_model(state, tensors)
        return state
