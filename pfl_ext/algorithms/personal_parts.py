"""The variables that stay with each user: how they are chosen, and one file with every user's values.

Letters: U users of a run, n users of a cohort, P numbers that a user keeps.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dataset.arrays import IntArray
from pfl_ext.algorithms.flat_variables import FlatVariables
from pfl_ext.algorithms.user_vectors import RowsOnMain, UserVectors
from pfl_ext.models.trained import new_part, of_norms
from pfl_ext.workers.distributed import is_main, tensors_from_main

FILE = "personal.f32"
"""Name of the file with the users' values, beside a run's checkpoints."""
BACKBONE = "backbone."
"""Prefix of the names of a classifier's variables."""


def trained_names(module: nn.Module) -> list[str]:
    """The variables that training changes, in their order."""
    return [name for name, p in module.named_parameters() if p.requires_grad]


def personal_names(module: nn.Module, personal: str | None) -> list[str]:
    """The trained variables of a classifier that stay with the user, in their order.

    Args:
        module: an `ImageClassifier`.
        personal: ``head`` is the last layer and a bottleneck or decoder before it. ``norms`` is scale and
            shift of every norm, found by the type of the layer. ``all`` is every variable. Other text is a
            list of prefixes of names, separated by commas, with or without ``backbone.``. None: no variable.

    Raises:
        ValueError: one line, when no trained variable is selected.
    """
    names = trained_names(module)
    if personal is None:
        return []
    if personal == "all":
        return names
    backbone = module.get_submodule(BACKBONE[:-1])
    if personal == "norms":
        norms = {BACKBONE + name for name, _ in of_norms(backbone)}
        found = [name for name in names if name in norms]
        if not found:
            raise ValueError(
                "no norm layer of this network is trained, so none can be personal: choose a "
                "model.arch with norm layers, and set model.trained to all or norms"
            )
        return found
    head = new_part(backbone)
    wanted = [f"{head}." if head else ""] if personal == "head" else personal.split(",")
    chosen = set[str]()
    for beginning in (word.strip().removeprefix(BACKBONE) for word in wanted):
        found = [name for name in names if name.removeprefix(BACKBONE).startswith(beginning)]
        if not found or (personal != "head" and not beginning):
            shown = ", ".join(name.removeprefix(BACKBONE) for name in names[:4])
            raise ValueError(
                f"federated.options.personal is {personal}, but no trained variable begins with "
                f"{beginning or 'nothing'!r}: choose head, norms, all, none, or beginnings of names "
                f"({shown}, ...)"
            )
        chosen.update(found)
    return [name for name in names if name in chosen]


class UserParts(RowsOnMain):
    """The users' vectors ``[P]``, kept from one round to the next.

    Worker 0 sends the vectors that a round needs to all workers and gets the changed ones back, so a run can
    continue with another number of workers. A user who never took part has no row in the file.

    Args:
        num_users: U.
        layout: the layout of a vector.
        path: the file; None: a temporary file.
    """

    def __init__(self, num_users: int, layout: FlatVariables, path: Path | None) -> None:
        self._layout = layout
        on_disk = is_main() and layout.length > 0
        self._rows = UserVectors(num_users, layout.length, path) if on_disk else None

    def read(self, users: IntArray, first: Tensor) -> Tensor:
        """The users' vectors ``[n, P]``, on every worker; ``first`` ``[P]`` for a user without one.

        All workers call this with the same users.
        """
        found = first.repeat(len(users), 1)
        if self._layout.length == 0:
            return found
        if self._rows is not None:
            for place, user in enumerate(users.tolist()):
                row = self._rows.read(user)
                if row is not None:
                    found[place] = torch.tensor(row, device=found.device)
        sent = tensors_from_main({"vectors": found} if is_main() else None)
        return sent["vectors"].to(first.device)

    def write(self, users: IntArray, vectors: Tensor) -> None:
        """Store these users' new vectors ``[n, P]``. Only worker 0 writes; the others' are ignored."""
        if self._rows is None:
            return
        for user, vector in zip(users.tolist(), vectors.cpu().numpy()):
            self._rows.write(user, vector)
        self._rows.end_round()
