"""How many images a group may hold."""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_ext.engine.training import LocalTraining
from pfl_ext.models.classifier import ImageClassifier

CPU_BYTES = 1 << 30  # of activations of one group; also about what keeps a group's layers in the caches
MOST_IMAGES = {"cpu": 32, "cuda": 256}
"""Of a group, whatever the memory. On a CPU twice as many took 0.88 of the time, but leave a small cohort's
lanes less even (README); on a card still to be measured."""
GPU_SHARE = 0.5  # of the free memory, for the groups of all lanes together
COPIES = 3.0  # a group's memory over that of its saved activations: their gradients and a layer's scratch


def activation_bytes(model: ImageClassifier, how: LocalTraining) -> int:
    """What forward keeps for backward, of one image, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def count(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights and t.ndim > 1 and t.shape[0] == 2:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    device = model.mean.device
    x = torch.zeros(2, 3, model.input_size, model.input_size, device=device)
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(count, lambda t: t),
        how.autocast(device),
    ):
        model.backbone(x)
    return max(1, sum(kept.values()) // 2)


def group_size(model: ImageClassifier, how: LocalTraining, lanes: int) -> int:
    """Images of one group: what memory allows, and no more than is of use."""
    device = model.mean.device
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] * GPU_SHARE / lanes
    else:
        budget = float(CPU_BYTES)
    return int(min(max(budget / (COPIES * activation_bytes(model, how)), 1), MOST_IMAGES[device.type]))
