"""IFCA: users are divided into clusters, each with a model of its own, while the models are trained
(Ghosh et al. 2020, "An Efficient Framework for Clustered Federated Learning", arXiv 2006.04088, Algorithm 1
with option II, model averaging).

The server has k models x_1, ..., x_k and sends all of them to the cohort S. User i computes the mean loss
F_i of each over its images of the round, each cropped as in training, and takes the model of its cluster,

    c_i = argmin_j F_i(x_j),    the lowest j where several are least.

It trains this model alone, as in FedAvg, which gives the update u_i. For each j the server's optimiser, which
has a state of its own for each cluster, steps on

    d_j = sum_{i in S, c_i = j} w_i u_i / sum_{i in S, c_i = j} w_i,

with FedAvg's weights w_i. A model that no user chose stays as it is, and so does one that too few users chose
for `aggregation.kind`. A user without images chooses no model.

With `shared: encoder` (the paper's weight sharing) only the head (last layer, bottleneck, decoder) differs
between clusters. The other layers are the same in all models: each cluster's d_j of them counts by its sum of
w_i, and the optimiser makes one step with the mean.

First models. Equal models would never separate. So each x_j is drawn from the seed around the run's first
weights w: each variable with mean m and standard deviation s becomes

    m + sqrt(1 - a^2) (w - m) + a s z,    z standard normal, a = `distance`.

This keeps m and s, and constant variables (biases of 0, norms). With a = 1, the default, models are drawn
independently; of pretrained weights a is 0.1. As in the authors' code for CIFAR-10, the models are drawn
again until each is chosen by some users of round 0 (`balance`). If no draw does that, the most even one is
kept. Otherwise the model that happens to be best would be trained by all users, and the others by nobody.

Scores. Each user is scored on images of its own that it does not train on, as by Ditto (`scored_on`), with
the model that has the least loss on its training images: ``personal``, also for users who never took part.
There is no single model for all of val and test, whose users need not have labels to choose by: the model of
the most users (`Clusters.largest`) is scored there, saved as ``model.safetensors`` and is ``server`` in the
scores of users. `MODELS` has all models after the last round.

Letters: U users of a run, n users of a cohort, k models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from pydantic.dataclasses import dataclass
from torch import Tensor

from dataset.arrays import IntArray
from pfl_ext import checkpoint
from pfl_ext.aggregation.rule import Mean
from pfl_ext.algorithms.algorithm import Algorithm, RunContext, Setup, Traffic, register, trained_bytes
from pfl_ext.algorithms.channel import Channel
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.clusters import (
    ClusterOptions,
    Clusters,
    check_differ,
    distance_of,
    first_models,
    least,
    numbered,
    own_names,
    together,
)
from pfl_ext.algorithms.own_images import OwnImages, ScoredOptions, Scores, check_scored, write_users
from pfl_ext.algorithms.personal_parts import trained_names
from pfl_ext.algorithms.personalised import shown
from pfl_ext.checkpoint import CHECKPOINTS
from pfl_ext.configs import STRICT
from pfl_ext.models.memory import refuse_beyond_memory
from pfl_ext.rules import Refusals
from pfl_ext.workers.distributed import is_main

MODELS = "clusters.safetensors"
"""The file of a run directory that holds the trained variables of all models, as ``number/name``."""
SHARED, OWN, OPTIMIZER, CHOSEN = "shared/", "clusters/", "optimizer/", "chosen"
"""Names in a checkpoint: of shared variables; of a cluster's, before its number; of the server's optimisers;
of the users' choices."""
CHOICE_BYTES = 4


@dataclass(frozen=True, config=STRICT)
class IfcaOptions(ScoredOptions, ClusterOptions):
    """The number of clusters, what they share, their first models, and how users are scored."""


@register("ifca")
class Ifca(Algorithm[Clusters]):
    """Iterative federated clustering. A round is one of each cluster's FedAvg."""

    options: ClassVar[type] = IfcaOptions
    takes: ClassVar[tuple[str, ...]] = ("compression", "aggregation", "attack")
    has_user_models: ClassVar[bool] = True
    idle: ClassVar[str] = "federated.reweight federated.max_importance augment.views"
    refusals: ClassVar[Refusals] = {
        "privacy": (
            "which model an ifca user trains depends on its images, so the number of users of each model "
            "would need noise, too, which nobody has argued: choose algorithm fedavg or fedprox for private "
            "training"
        ),
    }

    def __init__(self, context: RunContext) -> None:
        self.images = OwnImages.of(context.users, context.options, context.own)
        super().__init__(replace(context, users=self.images.users))
        module = context.model.pytorch_model
        self.names = trained_names(module)
        self.separate = own_names(module, context.options.shared)
        self.stages = self.context.stages(self.names)
        self.clients = Clients(self.context, before=self.stages)
        self._first = self.clients.weights()

    @classmethod
    def keeps_parts(cls, options: Any) -> bool:
        """No user of another cluster has the model that is scored on val and test."""
        return True

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse models that share all or nothing, that would be equal, or that do not fit in memory;
        scores of no images; and errors of compression, which would go from one model into another.
        """
        options, names = setup.options, own_names(setup.module, setup.options.shared)
        if options.shared == "encoder" and len(names) in (0, len(trained_names(setup.module))):
            which = "nothing but the head is" if names else "the head is not"
            raise ValueError(
                f"federated.options.shared is encoder, but {which} trained: set it to none, or "
                "model.trained to all"
            )
        check_differ(setup, names)
        check_scored(options, setup.own)
        if not options.balance and options.max_draws != IfcaOptions.max_draws:
            raise ValueError(
                "federated.options.max_draws has no effect if federated.options.balance is 0, with which the "
                "first draw is kept: set balance above 0, or leave max_draws out"
            )
        if setup.keeps_errors:
            raise ValueError(
                "compression.options.error_feedback is true, but a user's error belongs to one model, and "
                "with federated.algorithm ifca it may train another one next: set it to false"
            )
        size, k = trained_bytes(setup.module), options.num_clusters
        refuse_beyond_memory(k * size, f"ifca keeps {k:,} models", "lower federated.options.num_clusters")

    @classmethod
    def state_bytes(cls, setup: Setup) -> int:
        """All models in `MODELS`, and in each checkpoint those besides the first."""
        k, names = int(setup.options.num_clusters), own_names(setup.module, setup.options.shared)
        more = (k - 1) * sum(setup.module.get_parameter(name).nbytes for name in names)
        return CHECKPOINTS * more + k * trained_bytes(setup.module)

    def init(self, seed: int) -> Clusters:
        """The first draw of the models; round 0 may draw them again."""
        k = self.context.options.num_clusters
        shared = {name: w for name, w in self._first.items() if name not in self.separate}
        nobody = torch.full((self.context.users.num_users,), -1, dtype=torch.int64)
        optimizers = [defaultdict[Tensor, Any](dict) for _ in range(k + 1)]
        return Clusters(self.context.model, shared, self._drawn(0), optimizers, nobody)

    def _drawn(self, draw: int) -> list[Weights]:
        """The variables of the models that differ, in some draw."""
        first, k = {name: self._first[name] for name in self.separate}, self.context.options.num_clusters
        return first_models(first, k, distance_of(self.context), self.context.seed, draw)

    def round(self, state: Clusters, number: int) -> tuple[Clusters, dict[str, Any]]:
        """Have the cohort choose, train each model by those who chose it, and make the server's steps.

        Raises:
            Diverged: when a user's loss is not finite.
        """
        users, line = self.clients.cohort(number), dict[str, Any]()
        if number == 0:
            chosen, line["draws"] = self._first_choice(state, users)
        else:
            chosen = self._choice(state, users, number)
        state.chosen[users[chosen >= 0]] = torch.from_numpy(chosen[chosen >= 0])
        updates, lines = dict[int, Weights](), []
        parts = [users[chosen == cluster] for cluster in range(len(state.separate))]
        for cluster, part in enumerate(parts):
            if self._are_enough(len(part)):
                updates[cluster], of_part = self._mean_update(state.weights(cluster), part, number)
                lines.append(of_part)
        self._server_steps(state, updates, [self._weight(part) for part in parts], number)
        line = {
            **together(lines),
            "users": len(users),
            **line,
            "users_of_models": numbered([len(p) for p in parts]),
        }
        if unchanged := [c for c, part in enumerate(parts) if len(part) and c not in updates]:
            line["too_few_for"] = unchanged
        line["learning_rate"] = self.context.server_rate(number)
        every = self.context.options.score_every
        if every and (number + 1) % every == 0:
            line["clients"] = self.scores(state, number + 1)
        return state, line

    def _first_choice(self, state: Clusters, users: IntArray) -> tuple[IntArray, int]:
        """Draw the first models until they are chosen evenly enough; the choices, and how many draws it took.

        After as many draws as are allowed, the first of the most even ones is drawn again, and counts.
        """
        options, k = self.context.options, len(state.separate)
        found, fewest = list[IntArray](), list[int]()
        for draw in range(options.max_draws):
            state.separate = self._drawn(draw)
            found.append(self._choice(state, users, 0))
            counts = np.bincount(found[-1][found[-1] >= 0], minlength=k)
            fewest.append(int(counts.min()))
            share = int(options.balance * counts.sum() / k + 1e-9)
            at_least_one = options.balance > 0 and counts.sum() >= k
            if fewest[-1] >= max(share, int(at_least_one)):
                return found[-1], draw + 1
        best = int(np.argmax(fewest))
        state.separate = self._drawn(best)
        return found[best], options.max_draws

    def _choice(self, state: Clusters, users: IntArray, number: int) -> IntArray:
        """``[n]`` int64: the model with the least loss for each user; -1 for one without images.

        All workers call this.

        Raises:
            Diverged: when a loss is not finite.
        """
        models = [state.weights(cluster) for cluster in range(len(state.separate))]
        table = torch.zeros(len(users), 1 + len(models), dtype=torch.float64)
        with self.clients.dealt(users, number) as mine:
            for place in mine:
                losses, images = self.clients.losses_of(models, int(users[place]), number)
                table[place] = torch.tensor([images, *losses], dtype=torch.float64)
        self.clients.gather_losses(table, number)
        return least(table[:, 1:].numpy(), table[:, 0].numpy())

    def _are_enough(self, count: int) -> bool:
        """Whether this many updates of a model are enough for the run's aggregation."""
        if count == 0:
            return False
        size = getattr(self.context.rule.chosen, "bucket_size", 1)
        return isinstance(self.context.rule, Mean) or self.context.rule.works_with(-(-count // size))

    def _mean_update(self, weights: Weights, users: IntArray, number: int) -> tuple[Weights, dict[str, Any]]:
        """What is computed from the updates of some users who start from the same model."""
        for stage in self.stages:
            stage.begin(number, users)
        found = self.clients.mean_update(weights, users, number)
        for stage in self.stages:
            stage.end()
        return found

    def _weight(self, users: IntArray) -> float:
        """The total weight of some users: their number, or the number of their images."""
        by_images = self.context.by_images and self.context.rule.weighs
        return float(self.context.users.images[users].sum() if by_images else len(users))

    def _server_steps(
        self, state: Clusters, updates: Mapping[int, Weights], weights: Sequence[float], number: int
    ) -> None:
        """Step on the updates of the trained models, in place: on shared variables, then on each model's."""
        shared, optimizer = dict[str, Tensor](), state.model._central_optimizer
        whole = sum(weights[cluster] for cluster in updates)
        for name in state.shared if whole else ():
            parts = [update[name] * (weights[cluster] / whole) for cluster, update in updates.items()]
            shared[name] = torch.stack(parts).sum(0)
        steps = [(cluster, {n: update[n] for n in self.separate}) for cluster, update in updates.items()]
        for place, mean in [(-1, shared), *steps]:
            if mean:
                optimizer.state = state.optimizers[place]
                self.clients.server_step(state.weights(max(place, 0)), mean, number)
                stepped = self.clients.weights()
                (state.shared if place < 0 else state.separate[place]).update({n: stepped[n] for n in mean})

    def model(self, state: Clusters) -> PyTorchModel:
        """The run's model with the weights of the largest cluster."""
        return self.clients.model(state.weights(state.largest))

    def is_finite(self, state: Clusters) -> bool:
        """Whether all variables of all models are finite."""
        return all(
            bool(w.isfinite().all()) for part in (state.shared, *state.separate) for w in part.values()
        )

    def model_of(self, state: Clusters, user: int, number: int) -> PyTorchModel:
        """The model of the user's cluster."""
        (chosen,) = self._choice(state, np.array([user], np.int64), number).tolist()
        if chosen < 0:
            raise ValueError("has no images by which a model could be chosen")
        return self.clients.model(state.weights(chosen))

    def scores(
        self, state: Clusters, number: int, rows: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Users' scores after ``number`` rounds, by group (``seen``, ``new``); empty if none is scored.

        ``rows`` gets those of each user, with its ``cluster``. All workers call this.
        """
        scored, found = self.images.scored, dict[str, Any]()
        seen = (state.chosen[scored] >= 0).numpy()
        for group, users in (("seen", scored[seen]), ("new", scored[~seen])):
            if not len(users):
                continue
            chosen = self._choice(state, users, number)
            scores = Scores(self.images.split, users, self.model(state))
            with self.clients.dealt(users, number) as mine:
                scores.add("server", mine)
                for cluster in range(len(state.separate)):
                    self.clients.model(state.weights(cluster))
                    scores.add("personal", [place for place in mine if chosen[place] == cluster])
            found[group] = scores.summary(["personal", "server"])
            found[group]["users_of_models"] = numbered(np.bincount(chosen, minlength=len(state.separate)))
            if rows is not None:
                each = scores.each(group, self.images.training_images(users))
                of_models = {"personal": chosen.tolist(), "server": [state.largest] * len(users)}
                clusters = [c for kind in ("personal", "server") for c in of_models[kind]]
                rows += [{**row, "cluster": cluster} for row, cluster in zip(each, clusters)]
        return found

    def findings(self, state: Clusters) -> dict[str, Any]:
        """The scores on users' own images after the last round; `MODELS` is written."""
        rows: list[dict[str, Any]] = []
        clients, folder = self.scores(state, self.context.num_rounds, rows), self.context.folder
        if is_main():
            for group, found in clients.items():
                print(shown(self.context.model.pytorch_model.task, group, found))
                print(f"{group} users of each model: {[*found['users_of_models'].values()]}")
        if is_main() and folder is not None:
            if rows:
                write_users(folder.parent, rows)
            models = {
                f"{cluster}/{name}": tensor
                for cluster in range(len(state.separate))
                for name, tensor in state.weights(cluster).items()
            }
            checkpoint.save(folder.parent / MODELS, models, {"config_sha256": self.context.config_hash})
        return {"clients": clients, "clusters": {"users": numbered(state.counts), "model": state.largest}}

    def tensors(self, state: Clusters) -> dict[str, Tensor]:
        """All models with their frozen layers, the server's optimisers and the users' choices."""
        whole = state.model.pytorch_model.state_dict().items()
        found = {checkpoint.MODEL + name: tensor for name, tensor in whole if name not in self.names}
        found |= {SHARED + name: tensor for name, tensor in state.shared.items()} | {CHOSEN: state.chosen}
        for cluster, weights in enumerate(state.separate):
            found |= {f"{OWN}{cluster}/{name}": tensor for name, tensor in weights.items()}
        optimizer = state.model._central_optimizer
        for place, of_cluster in enumerate(state.optimizers):
            optimizer.state = of_cluster
            kept = checkpoint.optimizer_tensors(optimizer)
            found |= {f"{OPTIMIZER}{place}/{name}": tensor for name, tensor in kept.items()}
        return found

    def load(self, state: Clusters, tensors: Mapping[str, Tensor]) -> Clusters:
        """Restore `tensors`."""
        optimizer, variables = state.model._central_optimizer, state.model.variable_map

        def restored(prefix: str) -> Weights:
            found = checkpoint.part(tensors, prefix)
            return {name: tensor.to(variables[name].device) for name, tensor in found.items()}

        for place in range(len(state.optimizers)):
            optimizer.state = defaultdict(dict)
            checkpoint.restore_optimizer(optimizer, checkpoint.part(tensors, f"{OPTIMIZER}{place}/"))
            state.optimizers[place] = optimizer.state
        state.model.pytorch_model.load_state_dict(checkpoint.part(tensors, checkpoint.MODEL), strict=False)
        separate = [restored(f"{OWN}{cluster}/") for cluster in range(len(state.separate))]
        chosen = tensors[CHOSEN].cpu().clone()
        return Clusters(state.model, restored(SHARED), separate, state.optimizers, chosen)

    def bytes(self, state: Clusters) -> Traffic:
        """All models go down, shared variables once; an update of one model and its number go up."""
        down = sum(w.nbytes for part in (state.shared, *state.separate) for w in part.values())
        channel = next((stage for stage in self.stages if isinstance(stage, Channel)), None)
        up = sum(w.nbytes for w in state.weights(0).values()) if channel is None else channel.num_bytes
        return Traffic(down, up + CHOICE_BYTES)
