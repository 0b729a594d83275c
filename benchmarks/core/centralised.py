"""Centralised training: the same data, model, transform and metrics, in epochs."""

from __future__ import annotations

from functools import partial

import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.model.pytorch import PyTorchModel

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.precision import precision_of
from benchmarks.core.recorder import Recorder
from dataset.files import prefetched
from pfl_ext.algorithms.optimizers import AdamOptions
from pfl_ext.averaging import ModelAverage
from pfl_ext.data.augmented_views import augmented
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.data.mixing import mix
from pfl_ext.data.transforms import draw_keys
from pfl_ext.engine.cpu.choice import described
from pfl_ext.engine.cpu.layers import kernels_for, layers_for
from pfl_ext.engine.training import clip_each
from pfl_ext.evaluation import CentralEvaluation, autocast_of
from pfl_ext.models.classifier import RATE_FACTOR, ImageClassifier
from pfl_ext.randomness import stream
from pfl_ext.workers.distributed import is_main


def centralised_model(run: AnyRun, module: ImageClassifier) -> tuple[PyTorchModel, str]:
    """The network and its optimiser, in pfl's clothes so that it is scored and saved as a federated one; and
    how its training is computed, in a few words.

    On a CPU its layers are replaced by those of `pfl_ext.engine.cpu`, as the table there says.
    """
    runtime = run.runtime
    module.to(get_default_device())
    kernels = kernels_for(module) if runtime.engine == "fast" and runtime.cpu_kernels else None
    amp = precision_of(run, module)
    layers = layers_for(kernels, amp)
    if layers is not None:
        amp = layers.row.autocast
        module.backbone = layers.replaced(module.backbone)
    computed = described(module.trained_part, amp)
    if is_main():
        print(f"training is computed in {computed}")
    central = run.config.centralised
    rates = central.learning_rate, central.head_rate_factor, central.layer_decay
    groups = module.rate_groups(*rates)
    optimizer = central.build(groups, AdamOptions("keras"))
    return PyTorchModel(module, torch.optim.SGD, optimizer, amp_dtype=amp), computed


def train_epoch(run: AnyRun, store: ImageStore, model: PyTorchModel, epoch: int) -> float:
    """One pass over all images in a new order; the mean training loss."""
    config, device = run.config, get_default_device()
    rng, keys = (stream(config.seed, purpose, epoch) for purpose in ("centralised epoch", "dropout keys"))
    order = rng.permutation(int(store.user_offsets[-1]))
    size = config.centralised.batch_size
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    module, optimizer, central = model.pytorch_model, model._central_optimizer, config.centralised
    for group in optimizer.param_groups:
        rate = central.scheduled(central.learning_rate, epoch, central.num_epochs)
        group["lr"] = rate * group.get(RATE_FACTOR, 1.0)
    total = 0.0
    read = prefetched(store.read, batches, ahead=run.runtime.prefetch, threads=run.runtime.reader_threads)
    for images, targets in read:
        images, crops = augmented(images, rng, config.model.input_size, config.augment)
        crops = draw_keys(keys, crops) if config.keys or config.augment.mixes else crops
        collated = module.task.collate(targets)
        if config.augment.mixes:
            collated, crops = mix(collated, crops, keys, config.model.input_size, config.augment)
        optimizer.zero_grad()
        with autocast_of(model):
            loss = module.loss(
                torch.from_numpy(images).to(device),
                collated.to(device),
                torch.from_numpy(crops).to(device),
            )
        loss.backward()
        parameters = [p for p in module.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if config.centralised.max_grad_norm is not None:
            clip_each(gradients, config.centralised.max_grad_norm)
        if config.centralised.weight_decay:
            weights = [p.detach() for p in parameters]
            torch._foreach_add_(gradients, weights, alpha=config.centralised.weight_decay)
        optimizer.step()
        total += float(loss.detach()) * len(images)
    return total / len(order)


def train_centralised(
    run: AnyRun, store: ImageStore, val: ImageStore, module: ImageClassifier, recorder: Recorder
) -> PyTorchModel:
    """Train to the last epoch, from the run's checkpoint if it has one; the model after the last epoch.

    The average of the models, if there is one, is in ``recorder.checkpoints.average``.
    """
    config = run.config
    model, recorder.arithmetic = centralised_model(run, module)
    evaluation = partial(recorder.progress.timed, CentralEvaluation(val, threads=run.runtime.reader_threads))
    average = recorder.checkpoints.average = ModelAverage(config.evaluation, module, "epoch")
    if is_main() and config.evaluation.average != "none":
        print(average)

    def evaluated(number: int) -> None:
        with average.in_place():
            recorder.evaluated(number, evaluation(model), model)

    first, model = recorder.restore(model)
    if first == 0:
        average.add(0)
    for epoch in range(first, config.centralised.num_epochs):
        if epoch % config.every == 0:
            evaluated(epoch)
        loss = train_epoch(run, store, model, epoch)
        average.add(epoch + 1)
        recorder.step_done(epoch, {"train_loss": round(loss, 6)}, model)
    if not recorder.ended:
        evaluated(config.centralised.num_epochs)
        recorder.end(model)
    return model
