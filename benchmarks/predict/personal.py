"""A user's own model: the shared weights with what the user has kept, or the model of its cluster.

Both are read from the run's last checkpoint, which stays where it was trained with
``runtime.keep_checkpoints``. Where the run tuned a user before it scored it, this does so, too. A user's
cluster is the one whose model has the least loss on its training images, as when the run scored it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.core.experiment import trained_task
from benchmarks.core.federated import run_context, setup, training_data
from benchmarks.core.run_directory import RunDirectory
from benchmarks.core.single_users import own_split
from benchmarks.predict.trained import Trained, network_of
from dataset.arrays import IntArray
from dataset.store.hdf5 import DataFile
from pfl_ext import checkpoint
from pfl_ext.algorithms.personal_parts import trained_names
from pfl_ext.evaluation import CentralEvaluation
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.lora import merged
from pfl_ext.models.weights import some

AGAIN = "make the run again with --runtime.keep_checkpoints true"


def own_model(model: Trained, file: DataFile, user: str) -> tuple[Trained, str, IntArray]:
    """The model of a user after the last round, as the run scored it.

    Args:
        model: of the run.
        file: the run's data, which says who its users are.
        user: the user's id; the client's, where the run's partition was drawn.

    Returns:
        The model, and the split and its rows on which the run scored it. There are none where the user has
        no images there, or nothing of the user's was held out.

    Raises:
        ValueError: one line, when the run or the user kept nothing, or the files are gone or damaged.
    """
    directory, config = model.record.directory, model.record.config
    federated, folder = config.federated, model.record.directory / "checkpoint"
    chosen: Any = federated.chosen
    if config.mode != "federated" or not chosen.has_user_models:
        what = federated.algorithm if config.mode == "federated" else config.mode
        raise ValueError(
            f"--user {user}: users of {directory} have no models of their own ({what}): leave --user out"
        )
    experiment = model.on(file)
    run = dataclasses.replace(
        experiment.run, runtime=dataclasses.replace(experiment.run.runtime, engine="stock")
    )
    RunDirectory(run, directory, file)  # refuses other data
    task = trained_task(config, experiment.task_of(config, len(model.classes)), model.classes)
    module = network_of(model.record, task, len(model.classes), config.model)
    store = experiment.split("train")
    users = training_data(run, store, task, experiment.partition())
    whole = setup(config, module, users, directory, own_split(experiment, experiment.split))
    kept = chosen.files if chosen.state_bytes(whole) else ()
    for path in (folder / name for name in ("last.safetensors", *kept)):
        if not path.is_file():
            raise ValueError(
                f"--user {user}: {path} is missing, perhaps because the run removed it at its end: {AGAIN}"
            )
    ids = list(users.partition.user_ids)
    if user not in ids:
        raise ValueError(
            f"--user {user}: there is no training user with this id; the {len(ids):,} ids are like {ids[0]}"
        )
    number = ids.index(user)
    context = run_context(run, whole, CentralEvaluation(store))
    algorithm = chosen.start(dataclasses.replace(context, compressor=None))
    state = _state_at_end(algorithm, model, module)
    try:
        personal = algorithm.model_of(state, number, federated.num_rounds)
    except ValueError as why:
        raise ValueError(f"--user {user} {why}: leave --user out for the server's model") from None
    network = merged(personal.pytorch_model).eval()
    own = algorithm.images.split
    return dataclasses.replace(model, network=network), own.name, own.rows[number]


def _state_at_end(algorithm: Any, model: Trained, module: ImageClassifier) -> Any:
    """The algorithm's state after the run's last round, from the run's last checkpoint.

    Raises:
        ValueError: one line, for a checkpoint of another time, and one that is damaged.
    """
    path = model.record.directory / "checkpoint" / "last.safetensors"
    tensors, account = checkpoint.load(path)
    if account.get("config_sha256") != model.record.outcome["config_sha256"] or not account.get("ended"):
        raise ValueError(f"{path} is not the checkpoint of the end of the run: {AGAIN}")
    held = {*checkpoint.part(tensors, checkpoint.MODEL), *trained_names(module)}
    if lacking := [name for name in module.state_dict() if name not in held]:
        raise ValueError(f"{path} is of an earlier version, without {some(lacking)}: {AGAIN}")
    try:
        return algorithm.load(algorithm.init(model.record.config.seed), tensors)
    except ValueError as fault:
        raise ValueError(f"{fault}: restore it, or {AGAIN}") from None
