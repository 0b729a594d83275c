"""Combinations of values that no run of any benchmark could mean."""

from __future__ import annotations

from benchmarks.core.config.sections import FederatedConfig, TrainingConfig


def _check_scaffold(federated: FederatedConfig) -> None:
    """Refuse cohorts for which SCAFFOLD's c is no mean, and its keys where there is no SCAFFOLD."""
    if federated.algorithm != "scaffold":
        for key in ("scaffold_option", "scaffold_correction"):
            if getattr(federated, key) is not None:
                raise ValueError(
                    f"federated.{key} is of scaffold, but federated.algorithm is {federated.algorithm}: "
                    f"leave federated.{key} out, or set federated.algorithm to scaffold"
                )
        return
    if federated.replacement:
        raise ValueError(
            "scaffold keeps one control variate for each user, who must not come twice in a cohort: set "
            "federated.replacement to false"
        )
    if federated.sampling != "uniform":
        raise ValueError(
            "scaffold's mean control variate is that of users drawn alike: set federated.sampling to uniform"
        )


def check_training(config: TrainingConfig) -> None:
    """Refuse combinations that no run of any benchmark could mean.

    :raises ValueError: one line that names the key and what to do.
    """
    if config.model.input_size > config.data.image_size:
        raise ValueError(
            f"model.input_size is {config.model.input_size}, more than data.image_size = "
            f"{config.data.image_size}: the network's input is cut from the image"
        )
    server, num_rounds = config.server, config.federated.num_rounds
    if config.mode == "federated" and server.schedule != "constant" and server.warmup_rounds >= num_rounds:
        raise ValueError(
            f"server.warmup_rounds is {server.warmup_rounds}, not below federated.num_rounds = {num_rounds}: "
            "lower it"
        )
    _check_scaffold(config.federated)
    if config.mode == "federated" and config.local.virtual_size and config.federated.weighting != "users":
        raise ValueError("local.virtual_size makes all users of one size: set federated.weighting to users")
