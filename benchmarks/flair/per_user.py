"""Score the test users of finished runs one by one, and after fine-tuning on part of their images.

    python -m benchmarks.flair.per_user RUN_DIR... [--data_path F] [--personal.num_epochs 5]

Writes per_user.json and plots/per_user.png into each run directory and prints the quantiles over users. The
run's other files stay as they are. ``--evaluation.per_user true`` and ``--personal.num_epochs`` do the same
at the end of training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.model.pytorch import PyTorchModel
from safetensors.torch import load_file
from torch import optim

from benchmarks.core.config.trees import Tree
from benchmarks.core.execute import pfl_device
from benchmarks.core.experiment import build_model, data_of, has_data_of, trained_task
from benchmarks.core.single_users import trained_users
from benchmarks.flair.config import FLAIR, Run, parse
from benchmarks.flair.paper import SCORES as REPORTED
from benchmarks.flair.results import SPLIT, write_users
from benchmarks.flair.train import Flair
from benchmarks.reporting.folders import find_runs
from benchmarks.reporting.runs import read_run
from benchmarks.reporting.tables import text_table
from dataset.cli import run as run_command
from dataset.store.hdf5 import DataFile
from pfl_ext.algorithms.per_user import QUANTILES
from pfl_ext.evaluation import SCORES, CentralEvaluation
from pfl_ext.models.lora import ADAPTERS_FILE, load_merged
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.multi_label_scores import PRESENT, shown

SHOWN = ("C-AP", PRESENT, "O-AP", "O-F1")
ALLOWED = ("personal.", "runtime.", "data_path")


def evaluate(directory: Path, run: Run) -> Tree:
    """Load a finished run's model and score its users; the summary.

    Raises:
        ValueError: for a run that has not ended, or whose files do not fit together.
    """
    record = read_run(directory, FLAIR, REPORTED)
    if not record.finished:
        raise ValueError(f"{directory} cannot be scored: {record.fault or 'the run has not ended'}")
    model_file = directory / "model.safetensors"
    if not model_file.is_file():
        raise ValueError(f"{model_file} is missing: the model of a run is needed to score its users")
    config, path = run.config, run.data_path or data_of(directory)
    if path is None:
        raise ValueError(f"{directory} does not say where its data lies: give --data_path")
    with pfl_device(run.runtime.device), DataFile(path) as file:
        if has_data_of(directory, file) is False:
            raise ValueError(
                f"{path} has other data than {directory} learnt from: give the file of the run with "
                "--data_path"
            )
        flair = Flair(run, file)
        task = flair.task
        names = list(record.outcome["per_class_ap"])
        if list(task.label_names) != names:
            raise ValueError(
                f"{file.path} has other labels than the data of {directory}: give its file with --data_path"
            )
        weights = model_file if config.model.pretrained else None
        learnt = trained_task(config, MultiLabel(), names)
        module = build_model(config, len(names), weights, learnt, task.split)
        adapters = directory / ADAPTERS_FILE if config.model.trained == "lora" else None
        if adapters is not None and not adapters.is_file():
            raise ValueError(f"{adapters} is missing: what the run trained is needed to score its users")
        load_merged(module, load_file(model_file), {} if adapters is None else load_file(adapters))
        model = PyTorchModel(
            module.to(get_default_device()), optim.SGD, optim.SGD(module.parameters(), lr=1.0)
        )
        scored = CentralEvaluation(task.split(SPLIT), threads=run.runtime.reader_threads)(model)[SCORES]
        summary: Tree = write_users(directory, config, module, task, scored, trained_users(flair, SPLIT))
        return dict(summary["per_user"])


def quantile_table(summary: Tree) -> str:
    """Quantiles over users as plain text."""
    parts = {f"all {summary['users']} users": summary["quantiles"]}
    if "personal" in summary:
        personal = summary["personal"]
        title = f"{personal['users']} users, held out"
        parts |= {f"{title}, {when}": table for when, table in personal["quantiles"].items()}
    heads = ["mean", *(f"q{100 * q:g}" for q in QUANTILES)]
    return text_table(
        {
            f"{name} {shown(column)}": {head: table[column][head] for head in heads}
            for name, table in parts.items()
            for column in SHOWN
            if table[column]["n"]
        }
    )


def main(argv: Sequence[str]) -> None:
    """Score users of finished runs; see the module's text."""
    words = list(argv)
    if not words or {"--help", "-h"} & set(words):
        print(__doc__)
        return
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    foreign = [key for key in FLAIR.words(words[first:]) if not key.startswith(ALLOWED)]
    if foreign:
        raise ValueError(
            f"--{foreign[0]} is the run's own, and only personal.*, runtime.* and data_path can be given here"
        )
    for directory in find_runs([Path(word) for word in words[:first]]):
        run = parse(["--config", str(directory / "config.yaml"), *words[first:]])
        print(f"{directory}, {run.config.setting}, percent over the users of {SPLIT}")
        print(quantile_table(evaluate(directory, run)))


if __name__ == "__main__":
    sys.exit(run_command(main))
