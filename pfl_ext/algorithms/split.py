"""Split learning: client and server train the two parts of a cut network without showing them to each other.

Gupta and Raskar 2018 (arXiv 1810.06060, Algorithm 1), Vepakomma et al. 2018 (arXiv 1812.00564: u-shaped),
Thapa et al. 2020 (SplitFed, arXiv 2004.12088, Algorithm 1). For each batch the client computes ``a = f(x)``
with the first ``cut`` blocks and sends a and the labels. The server computes the loss of ``g(a)``, makes its
step, and sends ``dL/da`` back; with it the client makes its step. Only a, its gradient and the labels are
known at both ends. Each end has an optimiser of its own, as ``local`` says. Variants:

* ``relay``: the users of a round take turns, each for its local epochs. Each begins with the client weights
  that the user before it has left; the server continues with its own. The order of turns is drawn from
  (seed, round). This is SGD on one user's batches after another's.
* ``u_shaped``: like ``relay``, but the last layer (and a bottleneck before it) is also at the client. The
  server sends the input of that layer, and no label leaves the client.
* ``splitfed``: SplitFedV1. All users of a round begin with the round's weights and train at the same time,
  each with its own copy of the server's part. Both parts are averaged by the users' numbers of images. This
  is FedAvg with a learning rate of 1 at the server.

What is sent is not protected: images can be reconstructed from a, above all with few blocks at the client,
and labels from gradients. Client and server are simulated in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.model.pytorch import PyTorchModel
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import Algorithm, RunContext, Setup, Traffic, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.personal_steps import optimizer_of
from pfl_ext.configs import STRICT
from pfl_ext.data.federated_dataset import Member
from pfl_ext.data.user_images import Batch, UserImages
from pfl_ext.models.dropout import dropping
from pfl_ext.models.parts import Part, parts_of
from pfl_ext.randomness import stream
from pfl_ext.workers.distributed import begin_work, current

BUFFER = "momentum_buffer"  # torch's name
UNREAD = "server. federated.weighting"  # no server optimiser; averages are by images
UNREAD_IN_RUNTIME = "engine precision"


@dataclass(frozen=True, config=STRICT)
class SplitOptions:
    """Where the network is cut, and who trains when."""

    cut: PositiveInt = 1
    """Blocks of the network that a client has; a small network's blocks are its layers."""
    variant: Literal["relay", "splitfed", "u_shaped"] = "relay"
    """relay: users in turn; splitfed: all at once, then averaged; u_shaped: relay, last layer at the user."""
    momentum: Literal["restart", "handover"] = "restart"
    """restart: momentum is 0 when a turn begins. handover: the client's momentum is sent on with its weights,
    and the server keeps its own."""


@plain_dataclass
class Wire:
    """Passes tensors between client and server as copies without autograd's tape, and counts their bytes."""

    up: int = 0
    down: int = 0

    def send(self, tensor: Tensor, up: bool) -> Tensor:
        """The tensor as it arrives at the server (``up``) or at the client."""
        self.up, self.down = self.up + tensor.nbytes * up, self.down + tensor.nbytes * (not up)
        return tensor.detach().clone()


@plain_dataclass(frozen=True)
class SplitState:
    """The weights of all parts, and their momentum where it is handed over, both by name."""

    weights: Weights
    momentum: Weights = field(default_factory=dict)


@register("split")
class Split(Algorithm[SplitState]):
    """Split learning."""

    options: ClassVar[type] = SplitOptions
    idle: ClassVar[str] = UNREAD
    idle_in_runtime: ClassVar[str] = UNREAD_IN_RUNTIME

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients, self.wire = Clients(context), Wire()
        module = context.model.pytorch_model
        self.parts = parts_of(module, context.options.cut, context.options.variant == "u_shaped")

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse networks that cannot be cut, and options that need more than activations and gradients."""
        options, module = setup.options, setup.module
        if not all(p.requires_grad for p in module.backbone.parameters()):
            raise ValueError("split trains all layers: set model.trained to all")
        if setup.clips_all:
            raise ValueError(
                "split cannot compute the norm of all gradients together, because neither side has all "
                "of them: set local.clip_by to variable, or local.max_grad_norm to none"
            )
        if options.momentum == "handover" and not setup.is_sgd:
            raise ValueError(
                "split hands over the momentum of sgd only: set local.optimizer to sgd, or "
                "federated.options.momentum to restart"
            )
        if options.variant == "splitfed" and options.momentum == "handover":
            raise ValueError(
                "in splitfed, users train at the same time and pass nothing to each other: set "
                "federated.options.momentum to restart, or federated.options.variant to relay"
            )
        if options.variant == "splitfed" and setup.users.is_proportional:
            raise ValueError(
                "splitfed weights users by their images, which would count twice if they are drawn in "
                "proportion to them: set federated.sampling to uniform"
            )
        if options.variant != "splitfed" and current() is not None:
            raise ValueError(
                f"split {options.variant} trains one user after another in a single process: start it "
                "without a launcher (NP=1), or set federated.options.variant to splitfed"
            )
        try:
            parts_of(module, options.cut, options.variant == "u_shaped")
        except ValueError as fault:
            raise ValueError(
                f"split cannot cut this network after {options.cut} blocks ({fault}): choose another "
                "federated.options.cut or model.arch"
            ) from fault

    def init(self, seed: int) -> SplitState:
        """The network's first weights."""
        return SplitState(self.clients.weights())

    def round(self, state: SplitState, number: int) -> tuple[SplitState, dict[str, Any]]:
        """Train every user of the round together with the server."""
        begin_work(round=number, config=self.context.config_hash)
        users = self.context.users
        users.set_round(number)
        members = users.members(self.context.cohort_size)
        if self.context.options.variant == "splitfed":
            return self._at_once(state, members, number)
        order = stream(self.context.seed, "order of turns", number).permutation(len(members))
        self.clients.model(state.weights)  # each turn starts from what the last one left there
        momentum, losses = state.momentum, torch.zeros(2, dtype=torch.float64)
        for images in users.read_all([members[place] for place in order]):
            kept = momentum if self.context.options.momentum == "handover" else {}
            momentum, of_user = self._train(images, number, kept)
            losses += of_user
        after = SplitState(
            self.clients.weights(), momentum if self.context.options.momentum == "handover" else {}
        )
        return after, line_of_members(members, losses)

    def _at_once(
        self, state: SplitState, members: Sequence[Member], number: int
    ) -> tuple[SplitState, dict[str, Any]]:
        workers, users = get_ops().distributed, self.context.users
        shares = users.assign(np.array([m.user for m in members], np.int64), workers.world_size)
        mine = [members[place] for place in shares[workers.global_rank]]
        wide = self.context.accumulate
        sums = {name: torch.zeros_like(w, dtype=wide) for name, w in state.weights.items()}
        device = next(iter(sums.values())).device
        tally = torch.zeros(3, dtype=wide, device=device)  # images, losses, passes
        for images in users.read_all(mine):
            self.clients.model(state.weights)
            _, losses = self._train(images, number, {})
            for name, after in self.clients.weights().items():
                sums[name].add_((after - state.weights[name]).to(wide), alpha=len(images))
            tally += torch.tensor([len(images), *losses.tolist()], dtype=wide, device=device)
        if workers.world_size > 1:
            *reduced, tally = workers.all_reduce([*sums.values(), tally])
            sums = dict(zip(sums, reduced))
        images_in_all = max(float(tally[0]), 1.0)
        weights = {n: w + (sums[n] / images_in_all).to(w.dtype) for n, w in state.weights.items()}
        return SplitState(weights), line_of_members(members, tally[1:])

    def _train(self, images: UserImages, number: int, momentum: Weights) -> tuple[Weights, Tensor]:
        """Train one user from the weights in the model and this momentum.

        Returns:
            The momentum afterwards; and ``[2]``, the sum of losses over images and the number of images.
        """
        local = self.context.local_in(number)
        ends = [self._optimizer(part, local.local_learning_rate, momentum) for part in self.parts]
        losses = torch.zeros(2, dtype=torch.float64)
        for _ in range(local.local_num_epochs):
            for batch in images.iter(local.local_batch_size):
                losses += torch.tensor([self._step(batch, ends) * len(batch[0]), len(batch[0])])
        return dict(_momentum_of(self.parts, ends)), losses

    def _optimizer(self, part: Part, rate: float, momentum: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """A new optimiser for the variables of a part."""
        optimizer = optimizer_of(self.context.model, rate, part.parameters.values())
        for name, parameter in part.parameters.items():
            if name in momentum:
                optimizer.state[parameter][BUFFER] = momentum[name].clone()
        return optimizer

    def _step(self, batch: Batch, ends: Sequence[torch.optim.Optimizer]) -> float:
        """Make a step of all parts: client, server and, for a third part, client. Returns the mean loss."""
        module = self.context.model.pytorch_model
        x, targets = module.prepare(*(tensor.to(module.mean.device) for tensor in batch))
        if len(self.parts) == 2:  # with three parts the loss is computed at the client
            targets = self.wire.send(targets, up=True)
        entering, leaving = [x], list[Tensor]()
        with dropping(batch[2].to(module.mean.device)):
            for place, part in enumerate(self.parts):
                leaving.append(part(entering[-1]))
                if place + 1 < len(self.parts):
                    entering.append(self.wire.send(leaving[-1], up=place == 0).requires_grad_())
        loss = module.task.loss(leaving[-1], targets)
        torch.autograd.backward(loss)
        for place in range(len(self.parts) - 1, 0, -1):
            gradient = entering[place].grad
            assert gradient is not None
            torch.autograd.backward(leaving[place - 1], self.wire.send(gradient, up=place == 2))
        for optimizer in ends:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    def model(self, state: SplitState) -> PyTorchModel:
        """The run's model with the weights of all its parts."""
        return self.clients.model(state.weights)

    def tensors(self, state: SplitState) -> dict[str, Tensor]:
        """The tensors of the weights and the momentum."""
        both = (("weights", state.weights), ("momentum", state.momentum))
        return {f"{kind}/{name}": tensor for kind, part in both for name, tensor in part.items()}

    def load(self, state: SplitState, tensors: Mapping[str, Tensor]) -> SplitState:
        """The weights and the momentum in a checkpoint's tensors."""
        device = next(iter(state.weights.values())).device

        def of(kind: str) -> Weights:
            return {
                name.removeprefix(kind): tensor.to(device)
                for name, tensor in tensors.items()
                if name.startswith(kind)
            }

        return SplitState(of("weights/"), of("momentum/"))

    def bytes(self, state: SplitState) -> Traffic:
        """Means over all users. For each trained image: the tensors at every cut, and the label where it is
        sent. Once: the client's weights, with their momentum where it is handed over, down and up.
        """
        users, wire = self.context.users, Wire()
        passes = int(users.passes.sum()) / users.num_users
        largest = users.user_dataset(int(users.images.argmax()))
        images, targets, _ = next(largest.iter(self.context.local.local_batch_size))
        module = self.context.model.pytorch_model
        with torch.no_grad():
            x, targets = module.prepare(images[:1].to(module.mean.device), targets[:1])
            if len(self.parts) == 2:
                wire.send(targets, up=True)
            for place, part in enumerate(self.parts[:-1]):
                x = part(x)
                wire.send(x, up=place == 0)
                wire.send(x, up=place == 1)  # the gradient, which has the same size
        handed = sum(p.nbytes for part in self.parts[::2] for p in part.parameters.values())
        handed *= 2 if state.momentum else 1
        return Traffic(*(round(passes * each) + handed for each in (wire.down, wire.up)))


def _momentum_of(
    parts: Iterable[Part], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    for part, optimizer in zip(parts, optimizers):
        for name, parameter in part.parameters.items():
            buffer = optimizer.state[parameter].get(BUFFER)
            if buffer is not None:
                yield name, buffer


def line_of_members(members: Sequence[Member], losses: Tensor) -> dict[str, Any]:
    """The line of ``metrics.jsonl``; ``losses``: the sum of losses and the number of images trained on."""
    line = {"users": len(members), "images": sum(member.num_images for member in members)}
    total, passes = losses.tolist()
    return {**line, "train_loss": round(total / passes, 6)} if passes else line
