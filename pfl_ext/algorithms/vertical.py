"""Vertical federated learning: parties hold different parts of the same images, and one has the labels.

This follows FedML's classical vertical learning (He et al. 2020, arXiv 2007.13518; for the setting see
section 2.4 of Yang et al. 2019, arXiv 1902.04885). Party k has a network f_k for its part x_k of each image.
The outputs are ``U = sum_k f_k(x_k)``. The first party is the guest and has the labels; the others are hosts.
For each batch every host sends its f_k(x_k) to the guest. The guest computes the loss of U and sends
``dL/dU`` to every host. Each party backpropagates through its own network and makes its own step, as
``local`` says. No image, label or weight is sent.

The network has the parties (``model.parties``: 2 halves or 4 quadrants). The partition's users are not
parties: they are groups of images that all parties know by number. A round makes ``local.num_epochs`` passes
over the images of the cohort's users together, in batches across users. The order is drawn from (seed,
round), which all parties know. Momentum begins at 0 in each round.

A crop is the same for all parties of an image, so a party holds its part with a margin as wide as crops move.
If images are mixed (`pfl_ext.data.mixing`), each party mixes its own parts, by draws that all parties know.
Flips and scaled crops would give a party pixels from all of another's part, and are refused; so are changes
of pixels that depend on the whole image (`ImageChanges.of_pixels`). What is sent is not protected: outputs
and ``dL/dU`` reveal labels to hosts. The parties are simulated in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from pfl_ext.algorithms.algorithm import Algorithm, RunContext, Setup, Traffic, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.personal_steps import optimizer_of
from pfl_ext.algorithms.split import UNREAD, UNREAD_IN_RUNTIME, Wire, line_of_members
from pfl_ext.data.user_images import Batch
from pfl_ext.models.memory import refuse_beyond_memory
from pfl_ext.models.parties import PartyNetworks, total_of
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals

FLOAT = 4


@register("vertical")
class Vertical(Algorithm[Weights]):
    """Vertical federated learning. The state is the weights of all parties."""

    refusals: ClassVar[Refusals] = {
        **PRIVACY_NOT_ARGUED,
        "workers": (
            "vertical trains one batch of all parties at a time in a single process: start it without a "
            "launcher (NP=1)"
        ),
    }
    idle: ClassVar[str] = UNREAD
    idle_in_runtime: ClassVar[str] = f"{UNREAD_IN_RUNTIME} accumulate reduce"

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients, self.wire = Clients(context), Wire()
        backbone = context.model.pytorch_model.backbone
        assert isinstance(backbone, PartyNetworks)
        self.parties = backbone

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse networks without parties, and augmentation that would show a party another's pixels."""
        users = setup.users
        if not isinstance(setup.module.backbone, PartyNetworks):
            raise ValueError(
                "vertical needs parties that have a part of each image: set model.parties to 2 or 4"
            )
        if setup.clips_all:
            raise ValueError(
                "vertical cannot compute the norm of all gradients together, because no party has all "
                "of them: set local.clip_by to variable, or local.max_grad_norm to none"
            )
        sampling = users.sampling
        if sampling.flip != "none" or sampling.crop == "resized":
            raise ValueError(
                "vertical does not allow flips and scaled crops, because they would give a party the "
                "pixels of another party: set augment.flip to none and augment.crop to crop or padded"
            )
        if sampling.noise_by_user:
            raise ValueError(
                "vertical trains on all images together, whoever they are from, so no user has more noise "
                "than another: set augment.noise_by_user to false"
            )
        if setup.module.changes.of_pixels:
            raise ValueError(
                "vertical does not allow augment.rand_augment and augment.color_jitter, because a new "
                "pixel may depend on the pixels of another party: set both to none"
            )
        height = users.user_dataset(int(users.images.argmax())).raw_data[0].shape[1]
        # more users than there are may be drawn with replacement
        largest = np.resize(np.sort(users.images)[::-1], setup.cohort_size)
        refuse_beyond_memory(
            2 * int(largest.sum()) * 3 * height**2,
            "vertical has all images of a round in memory at once",
            "choose a smaller data.image_size or federated.cohort_size",
        )

    def init(self, seed: int) -> Weights:
        """The first weights of all parties."""
        return self.clients.weights()

    def round(self, state: Weights, number: int) -> tuple[Weights, dict[str, Any]]:
        """Train all parties on the images of the cohort."""
        local, users = self.context.local_in(number), self.context.users
        self.clients.model(state)
        users.set_round(number)
        images = users.pooled(self.context.cohort_size)
        optimizers = [
            optimizer_of(self.context.model, local.local_learning_rate, network.parameters())
            for network in self.parties.networks
        ]
        total, passes = 0.0, 0
        for _ in range(local.local_num_epochs):
            for batch in images.iter(local.local_batch_size):
                total += self._step(batch, optimizers) * len(batch[0])
                passes += len(batch[0])
        losses = torch.tensor([total, passes], dtype=torch.float64)
        return self.clients.weights(), line_of_members(users.members(self.context.cohort_size), losses)

    def _step(self, batch: Batch, optimizers: Sequence[torch.optim.Optimizer]) -> float:
        """Make a step of every party on a batch; returns the batch's mean loss, which the guest computes."""
        module = self.context.model.pytorch_model
        x, targets = module.prepare(*(tensor.to(module.mean.device) for tensor in batch))
        outputs = [network(part) for network, part in zip(self.parties.networks, self.parties.parts(x))]
        arrived = [outputs[0].detach(), *(self.wire.send(output, up=True) for output in outputs[1:])]
        total = total_of(arrived).requires_grad_()
        loss = module.task.loss(total, targets)
        torch.autograd.backward(loss)
        gradient = total.grad
        assert gradient is not None
        for place, (output, optimizer) in enumerate(zip(outputs, optimizers)):
            received = gradient if place == 0 else self.wire.send(gradient, up=False)
            torch.autograd.backward(output, received)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    def model(self, state: Weights) -> PyTorchModel:
        """The run's model with the weights of all parties."""
        return self.clients.model(state)

    def tensors(self, state: Weights) -> dict[str, Tensor]:
        """The weights."""
        return dict(state)

    def load(self, state: Weights, tensors: Mapping[str, Tensor]) -> Weights:
        """The weights."""
        return {name: tensors[name].to(weight.device) for name, weight in state.items()}

    def bytes(self, state: Weights) -> Traffic:
        """A host's traffic of a round, averaged over users: K numbers up and down for each image and pass."""
        users = self.context.users
        passes = self.context.cohort_size * int(users.passes.sum()) / users.num_users
        module = self.context.model.pytorch_model
        with torch.no_grad():
            blank = torch.zeros(1, *module.input_shape, device=module.mean.device)
            size = round(passes * module.backbone(blank).numel() * FLOAT)
        return Traffic(size, size)
