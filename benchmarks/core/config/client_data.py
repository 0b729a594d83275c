"""The section ``data`` of benchmarks that train on the users, or on the clients of a partition, of a file."""

from __future__ import annotations

from typing import Any

from pydantic.dataclasses import dataclass

from benchmarks.core.config.effects import check_training
from benchmarks.core.config.sections import ImageConfig, TrainingConfig
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class ClientDataConfig(ImageConfig):
    """The images, and the users who own them."""

    dataset: str = ""
    """Name of the data set; without --data_path, its file is data/NAME.hdf5."""
    partition: str | None = None
    """Partition of the file, or a drawn one: iid-clients-5-seed-0; none: the file's users."""
    taxonomy: str = "labels"
    """Name of the annotation in the file that is learnt."""
    val_share: float = 0.0
    """Share of each user's training images that becomes val, for a file without val; 0: the file's val."""
    test_users: str | None = None
    """Training users, by commas, who do not train; their images are test. none: the file's test."""


def check_clients(config: TrainingConfig) -> None:
    """`check_training`; refuse a share that is none or of private users, and what reads val where test is
    scored.

    Raises:
        ValueError: one line that names the key and what to do.
    """
    check_training(config)
    data: Any = config.data
    if not 0 <= data.val_share < 1:
        raise ValueError(f"data.val_share is {data.val_share:g}: give a number of at least 0 and below 1")
    if getattr(data, "scored", "val") != "test":
        if config.is_private and data.val_share:
            raise ValueError(
                f"data.val_share is {data.val_share:g}, so val would be training users' images, and its "
                "scores are exact, which privacy refuses: set data.val_share to 0 for the file's own val"
            )
        return
    if data.val_share != type(data).val_share:
        raise ValueError("data.val_share has no effect if data.scored is test: set data.scored to val")
    if config.evaluation.best_by != "last":
        raise ValueError(
            f"evaluation.best_by is {config.evaluation.best_by}, which would choose a model by its test "
            "score: set data.scored to val, or evaluation.best_by to last"
        )
