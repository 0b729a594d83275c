"""FedGKT: small networks at the clients and a large one at the server teach each other by their logits
(He, Annavaram, Avestimehr 2020, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge",
arXiv 2007.14513, Algorithm 1).

The run's network is cut after ``cut`` blocks. Client k has these blocks as its extractor f_k, and a small
classifier c_k on their features: a mean over positions (features ``[B, C, H, W]``; others are flattened),
then one linear layer. The server has g, all blocks after the cut. No weight leaves its owner, and no model is
averaged. In a round, with z_s the server's logits and z_c the client's,

1. each client makes ``local.num_epochs`` passes of SGD as ``local`` says, on
   ``CE(z_c, y) + alpha T^2 KL(softmax(z_s / T) || softmax(z_c / T))``, in the first round on CE alone;
2. each client sends, for each of its images once, ``H = f_k(x)``, ``z_c = c_k(H)`` and the label y;
3. the server makes ``server_epochs`` passes of Adam over all clients' batches, on
   ``CE(z_s, y) + alpha T^2 KL(softmax(z_c / T) || softmax(z_s / T))`` with ``z_s = g(H)``;
4. it sends ``z_s = g(H)`` of each image back, computed after the last of these steps.

What is chosen here:

* Logits that teach are stored by image (row of the store), so a client finds them whatever its batches are.
  H is computed from the whole image, as in scoring. So every image has one z_s, which also teaches the crops
  that a client trains on.
* Clients are the users of one cohort, drawn once from the seed, and take part in every round with all of
  their images. All begin with the run's first weights and with the same classifier.
* A batch of the server has images of one client. The batches and their order are drawn from (seed, round,
  pass). Adam keeps its state over the rounds, while SGD begins without momentum in each.
* ``server_epochs`` is 2 and not the paper's 20, which take too long for a CPU.
* Client k predicts by ``g(f_k(x))``, so there are as many networks as clients. The network of the client with
  most images (the first of several) is scored and saved in ``model.safetensors``; ``extractor_of`` in
  ``metrics.jsonl`` and ``results.json`` names this client. The other networks are in the checkpoint.

FedIR's weights apply to CE and not to KL. What is sent is not protected: images can be reconstructed from H,
and labels are sent as they are.

Letters: n clients, N images of all clients, B of a batch, K classes, F numbers of an image's features.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pfl.model.pytorch import PyTorchModel
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from dataset.arrays import IntArray
from pfl_ext.algorithms.algorithm import Algorithm, RunContext, Setup, Traffic, register
from pfl_ext.algorithms.clients import Weights
from pfl_ext.algorithms.distillation import divergence, pooled, shapes_of
from pfl_ext.algorithms.split import UNREAD_IN_RUNTIME, Wire
from pfl_ext.configs import STRICT
from pfl_ext.data.user_images import UserImages
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.image_changes import KEYED
from pfl_ext.models.memory import refuse_beyond_memory
from pfl_ext.models.parts import parts_of
from pfl_ext.randomness import stream, torch_stream
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals

FLOAT = 4
MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of the tensors that Adam keeps for a variable."""
CLASSIFIER = ("classifier.weight", "classifier.bias")


@dataclass(frozen=True, config=STRICT)
class FedGKTOptions:
    """Where the network is cut, and how both sides teach each other."""

    cut: PositiveInt = 1
    """Blocks of the network that a client has; a small network's blocks are its layers."""
    temperature: PositiveFloat = 3.0
    """T, by which logits are divided before their softmax is taken."""
    alpha: NonNegativeFloat = 1.0
    """Weight of the divergence from the other side's logits; 0: neither side teaches the other."""
    server_epochs: PositiveInt = 2
    """The server's passes over all clients' images in a round; the paper's is 20."""
    server_learning_rate: PositiveFloat = 1e-3
    """Factor of the server's Adam step."""


@plain_dataclass(frozen=True)
class GKTState:
    """The state at the start of a round."""

    clients: Weights
    """Extractors and classifiers of all clients, by variable: ``[n, ...]``."""
    server: Weights
    """g, by variable."""
    adam: Weights
    """`MOMENTS` of each variable of g, as ``variable/moment``."""
    steps: Tensor
    """Number of steps that the server has made, ``[]`` float32."""
    teacher: Tensor
    """z_s of all images ``[N, K]``, client after client, each in the order of its rows."""


@register("fedgkt")
class FedGKT(Algorithm[GKTState]):
    """Group knowledge transfer."""

    options: ClassVar[type] = FedGKTOptions
    refusals: ClassVar[Refusals] = {
        **PRIVACY_NOT_ARGUED,
        "workers": "fedgkt has one server, which trains in one process: start it without a launcher (NP=1)",
    }
    idle: ClassVar[str] = (
        "server. federated.weighting federated.sampling federated.replacement local.virtual_size"
    )
    idle_in_runtime: ClassVar[str] = f"{UNREAD_IN_RUNTIME} accumulate reduce"

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.wire, self.n = Wire(), context.cohort_size
        self.module: ImageClassifier = context.model.pytorch_model
        extractor, self.server = parts_of(self.module, context.options.cut)
        self.extractor, self.shapes = extractor, shapes_of(self.module, extractor, self.server)
        population = context.users.num_users
        drawn = stream(context.seed, "clients of fedgkt").choice(population, self.n, replace=False)
        self.users: IntArray = np.sort(drawn)
        sizes = context.users.partition.sizes[self.users]
        self.offsets: IntArray = np.concatenate([[0], np.cumsum(sizes)])
        self.shown = int(sizes.argmax())
        self.classifier = {
            name: torch.zeros(shape, device=self.module.mean.device).requires_grad_()
            for name, shape in zip(CLASSIFIER, (self.shapes.classifier, self.shapes.classifier[:1]))
        }
        if self.n < population:
            others = population - self.n
            print(
                f"FedGKT: {self.n} users are the clients; {others} other users do not take part",
                file=sys.stderr,
            )

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse networks that cannot be cut, options that one side cannot compute alone, a temperature of no
        term, and a state that does not fit in memory.
        """
        module, users, n = setup.module, setup.users, setup.cohort_size
        if not setup.options.alpha and setup.options.temperature != FedGKTOptions.temperature:
            raise ValueError(
                "federated.options.temperature has no effect if federated.options.alpha is 0: set alpha "
                "above 0, or leave temperature out"
            )
        if not all(p.requires_grad for p in module.backbone.parameters()):
            raise ValueError("fedgkt trains all layers: set model.trained to all")
        if not module.task.exclusive:
            raise ValueError("fedgkt needs exactly one label for each image: choose another algorithm")
        if users.sampling.mixes:
            raise ValueError(
                "fedgkt keeps the server's logits of each image, and mixed images have none: set "
                "augment.mixup and augment.cutmix to none"
            )
        if users.sampling.keys:
            every_key = ", ".join(f"augment.{key}" for key in KEYED)
            raise ValueError(
                "fedgkt keeps the server's logits of each image, but dropout and keyed augmentation change "
                f"the image: set model.dropout to false, and {every_key} to none"
            )
        if setup.rate_keys:
            raise ValueError(
                "with fedgkt the server trains the last layers at the rate "
                f"federated.options.server_learning_rate: set {' and '.join(setup.rate_keys)} to 1"
            )
        if users.total_images != users.partition.sizes.sum():
            raise ValueError("fedgkt trains on all images of a client: set local.max_images to none")
        cut = setup.options.cut
        try:
            parts = parts_of(module, cut)
        except ValueError as fault:
            raise ValueError(
                f"fedgkt cannot cut this network after {cut} blocks ({fault}): choose another "
                "federated.options.cut or model.arch"
            ) from fault
        shapes = shapes_of(module, *parts)
        of_client, of_server = (sum(p.numel() for p in part.parameters.values()) for part in parts)
        images = int(np.sort(users.partition.sizes)[-n:].sum())
        numbers = images * (math.prod(shapes.features) + 4 * shapes.outputs)
        numbers += 2 * n * (of_client + math.prod(shapes.classifier) + shapes.outputs) + 8 * of_server
        refuse_beyond_memory(
            FLOAT * numbers,
            f"fedgkt keeps {n:,} clients' networks and the features of {images:,} images",
            "choose a later federated.options.cut or a smaller network, or lower federated.cohort_size",
        )

    def init(self, seed: int) -> GKTState:
        """The first state. All clients have the run's first layers and one classifier drawn from the seed."""
        generator = torch_stream(seed, "classifier of fedgkt's clients")
        bound = self.shapes.classifier[1] ** -0.5
        with torch.no_grad():
            weight, bias = self.classifier.values()
            weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))
            bias.zero_()
        clients = {name: torch.stack([p.detach()] * self.n) for name, p in self._of_client().items()}
        server = _copies(self.server.parameters)
        adam = {f"{name}/{moment}": torch.zeros_like(w) for name, w in server.items() for moment in MOMENTS}
        shape = (int(self.offsets[-1]), self.shapes.outputs)
        return GKTState(clients, server, adam, torch.zeros(()), torch.zeros(shape, device=weight.device))

    def round(self, state: GKTState, number: int) -> tuple[GKTState, dict[str, Any]]:
        """Train all clients, which send features, logits and labels; then train the server."""
        users, device = self.context.users, self.module.mean.device
        users.set_round(number)
        with users.only(self.users):
            members = users.members(self.n)
        clients = {name: torch.empty_like(stacked) for name, stacked in state.clients.items()}
        features = torch.empty((len(state.teacher), *self.shapes.features), device=device)
        logits, labels = torch.empty_like(state.teacher), list[Tensor]()
        losses = torch.zeros(2, dtype=torch.float64)
        for client, images in enumerate(users.read_all(members)):
            rows = slice(*self.offsets[client : client + 2])
            _set(self._of_client(), {name: stacked[client] for name, stacked in state.clients.items()})
            losses += self._train(images, state.teacher[rows] if number else None, number)
            row = rows.start
            for h, z, y in self._sent(images):
                features[row : row + len(h)], logits[row : row + len(h)] = h, z
                row += len(h)
                labels.append(y)
            for name, weight in self._of_client().items():
                clients[name][client] = weight.detach()
        trained, of_server = self._serve(state, features, logits, torch.cat(labels), number)
        line = {"users": self.n, "images": len(features), **self.findings(state)}
        for key, (total, passes) in (("train_loss", losses.tolist()), ("server_loss", of_server.tolist())):
            line[key] = round(total / passes, 6)
        return replace(trained, clients=clients), line

    def _of_client(self) -> dict[str, Tensor]:
        """The variables of the client that trains at present."""
        return {**self.extractor.parameters, **self.classifier}

    def _logits(self, features: Tensor) -> Tensor:
        """z_c, ``[B, K]``."""
        return F.linear(pooled(features), *self.classifier.values())

    def _train(self, images: UserImages, teacher: Tensor | None, number: int) -> Tensor:
        """Make a client's passes, with z_s of its images. Returns the sum of losses and their number."""
        local, options, module = self.context.local_in(number), self.context.options, self.module
        variables = list(self._of_client().values())
        optimizer = self.context.model.new_local_optimizer(learning_rate=local.local_learning_rate)
        optimizer.param_groups[0]["params"] = variables
        losses = torch.zeros(2, dtype=torch.float64)
        for _ in range(local.local_num_epochs):
            for places, batch in images.iter_with_places(local.local_batch_size):
                x, targets = module.prepare(*(tensor.to(module.mean.device) for tensor in batch))
                z = self._logits(self.extractor(x))
                loss = module.task.loss(z, targets)
                if teacher is not None:
                    loss = loss + options.alpha * divergence(z, teacher[places], options.temperature)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                if local.local_max_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(variables, local.local_max_grad_norm)
                optimizer.step()
                losses += torch.tensor([float(loss.detach()) * len(places), len(places)])
        return losses

    @torch.no_grad()
    def _sent(self, images: UserImages) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Batches of features, logits and labels of a client's images, in the order of their rows."""
        for batch in images.once():
            x, targets = self.module.prepare(*(tensor.to(self.module.mean.device) for tensor in batch[:2]))
            features = self.extractor(x)
            yield (
                self.wire.send(features, up=True),
                self.wire.send(self._logits(features), up=True),
                self.wire.send(targets, up=True),
            )

    def _batches(self, number: int, epoch: int) -> list[IntArray]:
        """The images of each batch in one pass of the server. A batch has images of one client."""
        rng = stream(self.context.seed, "server of fedgkt", number, epoch)
        size, batches = self.context.local.local_batch_size, []
        for start, end in zip(self.offsets, self.offsets[1:]):
            rows = rng.permutation(np.arange(start, end))
            batches += [rows[first : first + size] for first in range(0, len(rows), size)]
        return [batches[place] for place in rng.permutation(len(batches))]

    def _serve(
        self, state: GKTState, features: Tensor, logits: Tensor, labels: Tensor, number: int
    ) -> tuple[GKTState, Tensor]:
        """Make the server's passes. Returns the new state, and the sum of losses and their number ``[2]``."""
        options, variables = self.context.options, self.server.parameters
        _set(variables, state.server)
        optimizer = torch.optim.Adam(variables.values(), options.server_learning_rate)
        for name, variable in variables.items():
            moments = {moment: state.adam[f"{name}/{moment}"].clone() for moment in MOMENTS}
            optimizer.state[variable] = {"step": state.steps.clone(), **moments}
        losses, steps = torch.zeros(2, dtype=torch.float64), 0
        for epoch in range(options.server_epochs):
            for batch in self._batches(number, epoch):
                rows = torch.from_numpy(batch).to(features.device)
                z = self._served(features[rows])
                loss = self.module.task.loss(z, labels[rows])
                loss = loss + options.alpha * divergence(z, logits[rows], options.temperature)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                losses += torch.tensor([float(loss.detach()) * len(batch), len(batch)])
                steps += 1
        optimizer.zero_grad()
        teacher, size = torch.empty_like(state.teacher), self.context.local.local_batch_size
        with torch.no_grad():
            for first in range(0, len(features), size):
                some = features[first : first + size].clone()  # the server's first layer may work in place
                teacher[first : first + size] = self.wire.send(self._served(some), up=False)
        adam = {
            f"{name}/{moment}": optimizer.state[variable][moment]
            for name, variable in variables.items()
            for moment in MOMENTS
        }
        return GKTState(state.clients, _copies(variables), adam, state.steps + steps, teacher), losses

    def _served(self, features: Tensor) -> Tensor:
        """``g(H)``, ``[B, K]``."""
        if features.ndim == 4:
            features = features.contiguous(memory_format=self.module.memory_format)
        return self.server(features)

    def findings(self, state: GKTState) -> dict[str, Any]:
        """The client whose extractor is part of the scored model."""
        return {"extractor_of": str(self.context.users.partition.user_ids[self.users[self.shown]])}

    def model(self, state: GKTState) -> PyTorchModel:
        """The server's part on the extractor of the client with most images."""
        _set(self.extractor.parameters, {name: w[self.shown] for name, w in state.clients.items()})
        _set(self.server.parameters, state.server)
        return self.context.model

    def tensors(self, state: GKTState) -> dict[str, Tensor]:
        """The tensors of the whole state."""
        parts = {"clients": state.clients, "server": state.server, "adam": state.adam}
        named = {f"{kind}/{name}": w for kind, part in parts.items() for name, w in part.items()}
        return {**named, "steps": state.steps, "teacher": state.teacher}

    def load(self, state: GKTState, tensors: Mapping[str, Tensor]) -> GKTState:
        """The state in a checkpoint's tensors."""

        def of(kind: str, part: Weights) -> Weights:
            return {name: tensors[f"{kind}/{name}"].to(w.device) for name, w in part.items()}

        return GKTState(
            of("clients", state.clients),
            of("server", state.server),
            of("adam", state.adam),
            tensors["steps"].cpu(),
            tensors["teacher"].to(state.teacher.device),
        )

    def bytes(self, state: GKTState) -> Traffic:
        """Features, logits and label of each image up, and logits down; averaged over clients."""
        users = self.context.users
        images, targets, _ = next(users.user_dataset(int(self.users[self.shown])).once())
        _, targets = self.module.prepare(images[:1].to(self.module.mean.device), targets[:1])
        logits = FLOAT * self.shapes.outputs
        up = FLOAT * math.prod(self.shapes.features) + logits + targets.nbytes
        each = int(self.offsets[-1]) / self.n
        return Traffic(round(each * logits), round(each * up))


def _copies(variables: Mapping[str, Tensor]) -> Weights:
    return {name: variable.detach().clone() for name, variable in variables.items()}


@torch.no_grad()
def _set(variables: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy the weights into variables of the same name; other weights are ignored."""
    for name, variable in variables.items():
        variable.copy_(weights[name])
