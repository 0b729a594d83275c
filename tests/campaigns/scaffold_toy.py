"""SCAFFOLD as pfl has it and as ours, on two quadratics that pull in different directions.

    python -m tests.campaigns.scaffold_toy

Losses ``h/2 (w - t)^2`` with (h, t) = (1, 0) and (4, 1), whose sum has its minimum at 0.8; from w = 3, 40
rounds of both users, 10 local steps each, all through pfl's own loop. Prints w after the last round, beside
Algorithm 1 of Karimireddy et al. 2020 in float64.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.bridge.pytorch.scaffold import PyTorchSCAFFOLDBridge as Bridge
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.core.code_version import commit
from benchmarks.core.facts import hardware
from pfl_ext.algorithms.scaffold import Scaffold, ScaffoldOptions

LOSSES = {"a": (1.0, 0.0), "b": (4.0, 1.0)}
START, ROUNDS, STEPS = 3.0, 40, 10
KINDS = (
    "FedAvg",
    *(f"{whose}, option {option}" for whose in ("pfl", "pfl with c_i - c", "ours") for option in ("I", "II")),
)
"""``pfl with c_i - c`` adds that instead of ``c - c_i`` to the gradient: its sign put right and no more."""


STEPS_OF_PFL = "do_control_variate_sgd"
_steps = getattr(Bridge, STEPS_OF_PFL)


def _swapped(*given: Any, local_c: Any, server_c: Any) -> None:
    _steps(*given, local_c=server_c, server_c=local_c)


class Quadratic(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([START]))

    def loss(self, h: Tensor, t: Tensor) -> Tensor:
        """``h/2 (w - t)^2``, the mean over rows."""
        return (h / 2 * (self.w - t) ** 2).mean()

    def metrics(self, h: Tensor, t: Tensor) -> dict[str, Any]:
        """pfl scores users in its first round."""
        return {"loss": Weighted.from_unweighted(self.loss(h, t).item())}


class OneRow(Dataset):
    """A user's loss as its single image."""

    def once(self) -> Iterator[Any]:
        """As `pfl_ext.data.federated_dataset.UserImages` has it."""
        yield from self.iter(None)


def end(kind: str, rate: float) -> float:
    """w after the last round of one of `KINDS`."""

    def user(name: str) -> OneRow:
        h, t = LOSSES[name]
        return OneRow([torch.tensor([h]), torch.tensor([t])], user_id=name)

    module = Quadratic()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = FederatedDataset(user, get_user_sampler("minimize_reuse", list(LOSSES)))
    common = (ROUNDS, ROUNDS, len(LOSSES), 0)
    name, _, option = kind.partition(", option ")
    algorithm: Any = FederatedAveraging()
    params: Any = NNAlgorithmParams(*common)
    if name.startswith("pfl"):
        algorithm = SCAFFOLD()
        params = SCAFFOLDParams(*common, len(LOSSES), option == "I", InMemoryUserStateStorage())
    elif name == "ours":
        users = SimpleNamespace(partition=SimpleNamespace(user_ids=list(LOSSES)), num_users=len(LOSSES))
        options = ScaffoldOptions("I" if option == "I" else "II")
        run: Any = SimpleNamespace(options=options, module=module, users=users, by_images=False, folder=None)
        algorithm = Scaffold(run)
    local = NNTrainHyperParams(local_num_epochs=STEPS, local_learning_rate=rate, local_batch_size=1)
    backend = SimulatedBackend(data, data, [WeightByUser()])
    steps = _swapped if name == "pfl with c_i - c" else _steps
    with mock.patch.object(Bridge, STEPS_OF_PFL, staticmethod(steps)):
        algorithm.run(params, backend, model, local, NNEvalHyperParams(None), send_metrics_to_platform=False)
    return module.w.item()


def direct(rate: float, option: str) -> float:
    """Algorithm 1 in float64."""
    h, t = np.array(list(LOSSES.values())).T
    x, c, own = START, 0.0, np.zeros(len(h))
    for _ in range(ROUNDS):
        y = np.full(len(h), x)
        for _ in range(STEPS):
            y = y - rate * (h * (y - t) - own + c)
        new = h * (x - t) if option == "I" else own - c + (x - y) / (STEPS * rate)
        x, c, own = x + float((y - x).mean()), c + float((new - own).mean()), new
    return x


def main() -> None:
    """Print the table."""
    print(f"{hardware()}; Python {platform.python_version()}, torch {torch.__version__}; commit {commit()}")
    columns = [*KINDS, "equations, I", "equations, II"]
    print("| local learning rate | " + " | ".join(columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for rate in (0.01, 0.05):
        ends = [end(kind, rate) for kind in KINDS] + [direct(rate, option) for option in ("I", "II")]
        print(f"| {rate} | " + " | ".join(f"{w:.4f}" if abs(w) < 1e4 else f"{w:.1e}" for w in ends) + " |")


if __name__ == "__main__":
    main()
