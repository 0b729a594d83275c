"""Combinations of values that no run of any benchmark could mean."""

from __future__ import annotations

from benchmarks.core.config.sections import TrainingConfig
from pfl_ext.algorithms.algorithm import refuse


def check_training(config: TrainingConfig) -> None:
    """Refuse combinations that no run of any benchmark could mean.

    Raises:
        ValueError: one line that names the key and what to do.
    """
    if config.model.input_size > config.data.image_size:
        raise ValueError(
            f"model.input_size is {config.model.input_size}, more than data.image_size = "
            f"{config.data.image_size}: the network's input is cut from the image"
        )
    federated = config.federated
    if config.mode == "federated":
        config.server.rate(0, federated.num_rounds)  # refuses a warm-up that is too long
        config.local.check_virtual(federated.weighting == "images")
        proportional = federated.sampling == "proportional"
        refusals = federated.algorithm_class.refusals
        refuse(refusals, replacement=federated.replacement, proportional=proportional)
