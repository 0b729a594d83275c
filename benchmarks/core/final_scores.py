"""What a run's last and best model score at its end."""

from __future__ import annotations

from typing import Any

from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.trees import Tree
from benchmarks.core.experiment import Experiment
from benchmarks.core.features import Inputs
from benchmarks.core.recorder import Recorder, columns
from benchmarks.core.single_users import scores_of_users
from pfl_ext.evaluation import CentralEvaluation
from pfl_ext.models.classifier import ImageClassifier


def final_scores(
    experiment: Experiment[Any],
    recorder: Recorder,
    model: PyTorchModel,
    inputs: Inputs,
    whole: ImageClassifier,
) -> Tree:
    """The last model's and the best one's; the model is left at the best, and the whole network in it.

    With an average over rounds both are averages, and ``unaveraged`` has the scores of the last model itself.
    """
    threads = recorder.run.runtime.reader_threads
    evaluations = {
        name: CentralEvaluation(inputs.split(name), threads=threads) for name in experiment.final_splits
    }
    task, average, plain = model.pytorch_model.task, recorder.checkpoints.average, Tree()

    def scored() -> tuple[dict[str, Metrics], Tree]:
        metrics = {name: evaluation(model) for name, evaluation in evaluations.items()}
        return metrics, {name: columns(task, of_split) for name, of_split in metrics.items()}

    if average is not None and average.config.average != "none":
        plain["unaveraged"] = scored()[1]
        average.put()
    metrics, scores = scored()
    last = scores
    if recorder.best.step != recorder.num_steps:
        model.pytorch_model.load_state_dict(recorder.best.weights)
        metrics, scores = scored()
    users: Tree = {}
    private = recorder.run.config.is_private
    if experiment.scores_users and not private and "clients" not in recorder.findings:
        users = scores_of_users(experiment, model, inputs, recorder.files.path)
    model._model = whole  # pfl has no way to set it
    return {
        **users,
        **scores,
        "last": last,
        **plain,
        "best_step": recorder.best.step,
        **experiment.final_results(recorder.files.path, model, metrics),
    }
