"""What a checkpoint holds where the state is a model and its optimiser, perhaps with states of users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from pfl_ext import checkpoint
from pfl_ext.algorithms.algorithm import Algorithm, UserState, is_finite


class ModelState:
    """The parts of a checkpoint: the model with its optimiser, and the states of `_kept`."""

    def _kept(self) -> Mapping[str, UserState]:
        """Further states, by the prefix of their names in a checkpoint."""
        return {}

    def tensors(self, state: PyTorchModel) -> dict[str, Tensor]:
        """The tensors of the model, its optimiser and the further states."""
        parts = {prefix: part.tensors() for prefix, part in self._kept().items()}
        kept = {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()}
        return checkpoint.model_tensors(state) | kept

    def saved(self) -> None:
        """From here on, the users' states in that checkpoint are not overwritten."""
        for part in self._kept().values():
            part.saved()

    def load(self, state: PyTorchModel, tensors: Mapping[str, Tensor]) -> PyTorchModel:
        """Restore the model, its optimiser and the further states."""
        checkpoint.restore_model(state, tensors)
        for prefix, part in self._kept().items():
            part.load(checkpoint.part(tensors, prefix))
        return state

    def is_finite(self, state: PyTorchModel) -> bool:
        """Whether all that is trained of the model is finite."""
        return is_finite(state)


class ServerModelAlgorithm(ModelState, Algorithm[PyTorchModel]):
    """An algorithm whose rounds change the run's model, which is its state."""

    has_server_model: ClassVar[bool] = True

    def init(self, seed: int) -> PyTorchModel:
        """The run's model, whose weights were drawn from the run's seed."""
        return self.context.model

    def model(self, state: PyTorchModel) -> PyTorchModel:
        """The state itself."""
        return state
