"""Algorithms on pfl's loop that correct each user's local steps by a vector that they keep of that user.

`Controls` has the vectors, and `WithControls` is the base of the algorithms: SCAFFOLD, where a user's vector
is an estimate of its gradient, and FedDyn, where it is the linear term of its objective. The server has one
more vector, which it keeps at the weighted mean of all users' vectors.

Letters: P parameters that are trained, U users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pfl.context import CentralContext
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from dataset.arrays import IntArray
from pfl_ext.algorithms.algorithm import Setup, trained_bytes
from pfl_ext.algorithms.cohort_vectors import CohortVectors
from pfl_ext.algorithms.flat_variables import FlatVariables
from pfl_ext.algorithms.on_pfl import OnPfl


class Controls(FlatVariables):
    """The server's vector and every user's, ``[P]``, in the order of the model's trained parameters.

    All are 0 at first. With several workers each of them has the server's vector, and `CohortVectors` the
    users'.

    Args:
        module: the model, whose parameters are not changed here.
        user_ids: the ids of the U users, as in their data sets.
        path: the file of the users' vectors; None: a temporary file.
    """

    def __init__(self, module: nn.Module, user_ids: Sequence[str], path: Path | None = None) -> None:
        super().__init__(module, [name for name, p in module.named_parameters() if p.requires_grad])
        self.server = torch.zeros(self.length, device=self.device)
        self._numbers = {user: number for number, user in enumerate(user_ids)}
        self._users = CohortVectors(len(user_ids), self.length, path)

    def number(self, user_id: str | None) -> int | None:
        """The number of the user with this id, 0 to U - 1; None for the placeholder of an idle worker."""
        return None if user_id is None else self._numbers[user_id]

    def begin(self, cohort: IntArray) -> None:
        """Begin a round of these users; all workers call this."""
        self._users.begin(cohort)

    def control(self, user: int | None) -> Tensor:
        """A user's vector ``[P]`` at the start of the round."""
        found = None if user is None else self._users.read(user)
        return torch.zeros_like(self.server) if found is None else found.to(self.server.device)

    def rates(self, rate: float, factors: Sequence[float]) -> float | Tensor:
        """A learning rate times each variable's factor, ``[P]``; the rate itself without factors."""
        if not factors:
            return rate
        sizes = torch.tensor(self.sizes)
        return (rate * torch.tensor(factors)).repeat_interleave(sizes).to(self.server.device)

    def renew(self, user: int | None, control: Tensor, change: Tensor) -> None:
        """Store ``control + change``, which is the user's vector from the next round on."""
        if user is not None:
            self._users.write(user, control + change)

    def end_round(self, change: Tensor) -> None:
        """Add ``change`` ``[P]`` to the server's vector, and make the users' new vectors current."""
        self.server += change
        self._users.end()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint; the users' vectors stay in their file."""
        return {"c": self.server, **self._users.tensors()}

    def saved(self) -> None:
        """Is called once the checkpoint with the last `tensors` has its final name."""
        self._users.saved()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint's `tensors`. Raises ValueError as `UserVectors.load` does."""
        self._users.load(tensors)
        self.server.copy_(tensors["c"])


class WithControls(OnPfl):
    """Base of these algorithms. A subclass declares ``files`` with one name, of the users' vectors."""

    tunes_engine = False  # what it keeps of a user changes whenever that user trains
    idle_in_runtime = "reduce"  # rounded sums would move the server's vector away from the users' mean
    title: ClassVar[str]
    state_key: ClassVar[str] = "federated.options.max_state_gb"
    """Config key of the most disk that users' vectors may take."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        path = None if setup.folder is None else setup.folder / self.files[0]
        self.controls = self.user_state = Controls(setup.module, setup.users.partition.user_ids, path)

    def begin(self, cohort: IntArray) -> None:
        """See `OnPfl.begin`."""
        self.controls.begin(cohort)

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse users' vectors that need more disk than allowed."""
        state, most = cls.state_bytes(setup) / 1e9, setup.options.max_state_gb
        if state > most:
            raise ValueError(
                f"{cls.title} keeps a copy of the model for each of {setup.touched:,} users, which is "
                f"{state:,.1f} GB on disk, above {cls.state_key} = {most:g}: raise this limit, or choose "
                "algorithm fedavg or fedprox"
            )

    @classmethod
    def state_bytes(cls, setup: Setup) -> int:
        """See `Choice.state_bytes`."""
        return setup.touched * trained_bytes(setup.module)

    @property
    def total_weight(self) -> float:
        """The sum of the weights of all users of the run; U where every user has the weight 1."""
        users = self.setup.users
        return float(users.total_images if self.setup.by_images else users.num_users)

    def check_steps(self, model: PyTorchModel, context: CentralContext) -> None:
        """Refuse local steps to which no correction is added.

        Raises:
            ValueError: one line with the reason.
        """
        local = context.model_train_params
        other_steps = local.grad_accumulation_steps != 1 or local.get("local_num_steps")
        if model.grad_scaler is not None or other_steps:
            raise ValueError(
                f"{self.title} does not support gradient scaling, gradient accumulation and "
                "local_num_steps: leave them out"
            )


def only_weighted(name: str, why: str) -> dict[Any, str]:
    """Refusals of an algorithm of users who must come once in a cohort, and whose updates no other
    postprocessor than a weighting may change."""
    alone = f"{why}: choose algorithm fedavg or fedprox"
    return {
        "privacy": alone,
        "postprocessors": alone,
        "replacement": (
            f"{name} keeps one vector for each user, so a user must not be drawn twice in a cohort: set "
            "federated.replacement to false"
        ),
        "proportional": (
            f"{name}'s server keeps the mean over users, so all users must be drawn with the same "
            "probability: set federated.sampling to uniform"
        ),
    }
