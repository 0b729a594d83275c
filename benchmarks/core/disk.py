"""Whether the disk has room for the files of a run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.core.config.sections import TrainingConfig
from dataset.journal import free
from pfl_ext.algorithms.algorithm import trained_bytes
from pfl_ext.algorithms.optimizers import OptimizerConfig
from pfl_ext.checkpoint import CHECKPOINTS
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.workers.distributed import from_main, is_main


def least_bytes(config: TrainingConfig, module: ImageClassifier, of_users: int) -> int:
    """The least bytes on disk that a run needs for checkpoints, users' states and ``model.safetensors``.

    A checkpoint holds the model, the best one, the average over rounds if there is one, and one number
    (momentum) or two (adaptive optimisers) for each trained parameter, unless the algorithm has no such
    optimiser. Frozen layers are counted in ``model.safetensors`` alone: a run on features leaves them out of
    its checkpoints.

    Args:
        config: of the run.
        module: the network before its first step.
        of_users: see `pfl_ext.algorithms.algorithm.Choice.state_bytes`.
    """
    is_federated = config.mode == "federated"
    server: OptimizerConfig = config.server if is_federated else config.centralised
    moments = (1 if server.momentum else 0) if server.optimizer == "sgd" else 2
    if is_federated and "server." in config.federated.chosen.idle.split():
        moments = 0
    averages = config.evaluation.average != "none"
    whole: int = sum(tensor.nbytes for tensor in module.state_dict().values())
    return CHECKPOINTS * (2 + moments + averages) * trained_bytes(module) + whole + of_users


def check_disk(config: TrainingConfig, module: ImageClassifier, of_users: int, directory: Path) -> None:
    """Refuse a run that worker 0's disk has no room for; files that its checkpoints have already are room.

    Args:
        config: of the run.
        module: the network before its first step.
        of_users: see `least_bytes`.
        directory: of the run, which need not exist.

    Raises:
        ValueError: one line with both sizes.
    """
    room = None
    if is_main():
        folder = (directory / "checkpoint").absolute()  # which may be a link to another disk
        room = free(folder) + sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
    room, need = from_main(room), least_bytes(config, module, of_users)
    if need > room:
        raise ValueError(
            f"this run needs at least {need / 1e9:.2g} GB in {directory}, but only {room / 1e9:.2g} GB "
            "are free: free some space, or choose another --run_dir"
        )
