"""The speed of each user's device, and the virtual seconds that its part in a round takes.

By FedScale's formula (Lai et al. 2022, arXiv 2105.11367) a backward pass costs twice a forward pass, so

    seconds = 3 * images * ms_per_sample / 1000 + kbit_down / kbps_down + kbit_up / kbps_up

with ``images`` the number of images in all steps together. A device's speeds are its class's, or a log-normal
draw with the class's as its median, or those of a file.

Letters: U users, n some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataset.arrays import FloatArray, IntArray
from pfl_ext.devices.config import DeviceClass, DevicesConfig
from pfl_ext.devices.traces import read_capacities, sha256_of
from pfl_ext.randomness import stream

PASSES = 3
"""Cost of a training step, in forward passes."""


class Traffic(NamedTuple):
    """Bytes between the server and each user of a round; updates count with their compressed size."""

    down: int
    up: int


def classes_of(num_users: int, classes: Sequence[DeviceClass], seed: int) -> IntArray:
    """The class of each user's device ``[U]``. Numbers follow the classes' shares; users are drawn."""
    shares = np.cumsum([each.share for each in classes])
    bounds = np.rint(shares / shares[-1] * num_users)
    order = stream(seed, "device classes").permutation(num_users)
    return np.searchsorted(bounds, order, side="right").astype(np.int64)


class Fleet:
    """The devices of U users.

    Args:
        config: speeds by class or file.
        user_ids: the users' ids.
        seed: the run's seed.

    Raises:
        ValueError: one line, when a file of speeds cannot be read.
    """

    def __init__(self, config: DevicesConfig, user_ids: Sequence[str], seed: int) -> None:
        self.speeds: FloatArray | None = None
        """``[U, 3]``: milliseconds to pass one image forward, kbit/s up and down; None without a clock."""
        if config.capacities is not None:
            path = Path(config.capacities)
            sha256_of("devices.capacities", path, config.capacities_sha256)
            self.speeds = read_capacities(path, user_ids, seed)
        elif classes := config.device_classes:
            table = np.array([[each.ms_per_sample, each.kbps_up, each.kbps_down] for each in classes])
            self.speeds = table[classes_of(len(user_ids), classes, seed)]
            if config.sigma:
                draws = stream(seed, "device speeds").standard_normal((len(user_ids), 3))
                self.speeds = self.speeds * np.exp(config.sigma * draws)

    def seconds(self, users: IntArray, images: IntArray, sent: Traffic) -> FloatArray:
        """``[n]`` virtual seconds of these users, who train on ``images`` images each; 0 without a clock."""
        if self.speeds is None:
            return np.zeros(len(users))
        ms, up, down = self.speeds[users].T
        kbit_down, kbit_up = (8 * count / 1000 for count in sent)
        return np.asarray(PASSES * images * ms / 1000 + kbit_down / down + kbit_up / up)
