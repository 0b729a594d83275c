"""Games that train: through pfl's loop, one made-up update at a time, and by the engine, from images."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from dataset.arrays import ByteArray, IntArray
from pfl_ext.auditing.canaries import NAMES, TENSORS, CanaryNetwork, Directions, Game, _signs
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.privacy.central import PrivateMean
from pfl_ext.rules import Refusals

Bytes = ByteArray


class CanaryStore:
    """One image per user. That of canary (v, k, i) has the gradient of its direction: see `PixelNetwork`.

    A pixel of 128 is zero to the network, 255 and 1 are plus and minus 127; labels are the signs of ``h_k``.
    """

    def __init__(self, directions: Directions, signs: IntArray) -> None:
        self.user_ids = [str(user) for user in range(len(signs))]
        self.user_offsets = np.arange(len(signs) + 1, dtype=np.int64)
        self._directions, self._signs = directions, signs
        self.side = 1
        while 3 * self.side**2 < TENSORS * directions.columns:
            self.side += 1

    def read(self, rows: IntArray) -> tuple[Bytes, Bytes]:
        n = self._directions.columns
        images = np.full((len(rows), 3 * self.side**2), 128, np.uint8)
        for image, row in zip(images, rows.tolist()):
            v, _, i = self._directions.place(row)
            pattern = np.sign(_signs(TENSORS)[v]) if i >= self._directions.whole else np.eye(TENSORS)[v]
            image[i : TENSORS * n : n] = 128 + 127 * pattern * self._signs[row]
        pictures = images.reshape(-1, 3, self.side, self.side).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(pictures), self.targets(rows)

    def targets(self, rows: IntArray) -> Bytes:
        _, k, _ = self._directions.place(rows)
        labels: Bytes = (_signs(self._directions.labels)[k] > 0).astype(np.uint8)
        return labels


class PixelNetwork(CanaryNetwork):
    """Each layer sees its part of the pixels, and the layers' outputs are added up.

    The gradient at an image x with labels y is ``(1/2 - y_k) x_i / K`` for each label k and pixel i.
    """

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x.flatten(1)[:, : TENSORS * self.columns], self.columns, 1)
        return torch.stack([layer(part) for layer, part in zip(self.parts, parts)]).sum(0)


class EngineGame(Game):
    """The engine trains `PixelNetwork` on the images of a `CanaryStore`."""

    def store(self) -> CanaryStore:
        signs = np.sign(self.lengths(np.arange(self.canaries + self.others))).astype(np.int64)
        return CanaryStore(self.directions, signs)

    def network(self) -> PixelNetwork:
        return PixelNetwork(self.directions)

    def engine(self, network: ImageClassifier) -> CohortEngine:
        return CohortEngine(network)


class OneByOne:
    """In the place of pfl's FedAvg: a user's made-up update, one at a time."""

    refusals: ClassVar[Refusals] = {}

    def __init__(self, game: Game, mechanism: PrivateMean) -> None:
        self._game, self._mechanism = game, mechanism

    def simulate_one_user(
        self, model: Any, user: Any, context: Any
    ) -> tuple[MappedVectorStatistics, Metrics]:
        directions = self._game.directions
        if len(user) == 0:  # the nobody of an empty cohort
            nothing = {name: torch.zeros(1, directions.columns) for name in NAMES}
            return MappedVectorStatistics(nothing), Metrics()
        number = int(user.user_id)
        length = float(self._game.lengths(np.array([number]))[0]) * self._mechanism.clipping_bound
        tensors = torch.from_numpy(directions.vector(number) * length).float()
        return MappedVectorStatistics(dict(zip(NAMES, tensors))), Metrics()


class LoopGame(EngineGame):
    """Updates go one by one through pfl's loop and `PrivateMean.postprocess_one_user`."""

    def engine(self, network: ImageClassifier) -> Any:
        return None

    def algorithm(self, mechanism: PrivateMean) -> OneByOne:
        return OneByOne(self, mechanism)
