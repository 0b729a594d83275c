"""What algorithms have in common whose whole state is the server's model and its optimiser."""

from __future__ import annotations

from collections.abc import Mapping

from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import Algorithm


class ServerModelAlgorithm(Algorithm[PyTorchModel]):
    """Such an algorithm: its rounds step the run's model, and a checkpoint holds nothing else."""

    def init(self, seed: int) -> PyTorchModel:
        """The run's model, whose weights were drawn from the run's seed."""
        return self.means.model

    def model(self, state: PyTorchModel) -> PyTorchModel:
        """The state itself."""
        return state

    def tensors(self, state: PyTorchModel) -> dict[str, Tensor]:
        """The tensors of the model and the server's optimiser."""
        return checkpoint.model_tensors(state)

    def load(self, state: PyTorchModel, tensors: Mapping[str, Tensor]) -> PyTorchModel:
        """Put both back."""
        checkpoint.restore_model(state, tensors)
        return state
