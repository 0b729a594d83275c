"""A lane trains users one after another with its own weights, on one CPU core or on one stream of a GPU.

Letters: P parameters in all, V variables (parameter tensors), B images of a batch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_ext.engine.adaptive import Moments
from pfl_ext.engine.cpu.dense import Linear, Room, gradients_into
from pfl_ext.engine.gpu_layers import steps_for
from pfl_ext.engine.gradients import squared_norms_of
from pfl_ext.engine.graphs import StepGraphs
from pfl_ext.engine.layout import PIECE, Layout, in_same_memory, trained
from pfl_ext.engine.one_step import Sums
from pfl_ext.engine.short_weights import ShortWeights
from pfl_ext.engine.tape import TapedNetwork
from pfl_ext.engine.training import Batch, LocalTraining, clip_gradients
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.privacy.central import ScalesUpdates

AHEAD = 8
"""Number of users whose training a lane may queue on a GPU beyond the one in work."""


class Lane:
    """Local weights, a sum of updates, and a taped network. Lanes share the central model and only read it.

    Args:
        first: the central weights ``[P]``, of which the parameters of ``central`` are views, and a network
            that computes with them.
        once: whether no layer is used twice. Then gradients need not be added up over uses, and a weight can
            be changed as soon as its gradient is known.
        graphs: whether a GPU's steps are recorded.
        kernels: whether they may end in `gpu_steps`.
    """

    def __init__(
        self,
        central: ImageClassifier,
        layout: Layout,
        first: ShortWeights,
        accumulate: torch.dtype,
        once: bool = False,
        graphs: bool = True,
        kernels: bool = True,
    ) -> None:
        self.layout, self._first, self._start, self._once = layout, first, first.weights, once
        self._local = layout.zeros()  # first the weights, at the end the update
        self._velocity: Tensor | None = None  # of momentum
        self._velocities: list[Tensor] = []
        self._moments: Moments | None = None  # of Adam
        self._corrections: list[Tensor] = []  # for the next user, by variable
        self.besides: dict[str, Tensor] = {}  # sum of what users send besides updates
        self._moved = first.like(in_same_memory(central), layout, self._local)
        self._central, self._module = central, self._moved.module
        self._starts, self._weights = layout.views(self._start), layout.views(self._local)
        self._rooms, self._places = self._rooms_of()
        self._steps = steps_for(layout, first.are_short) if kernels else None
        vector = layout.zeros(accumulate)
        losses = torch.zeros(2, dtype=torch.float64, device=layout.device)
        self.sums = Sums(vector, dict(zip(layout.names, layout.views(vector))), [], losses)
        self.net = TapedNetwork(central.backbone)
        on_gpu = layout.device.type == "cuda"
        self._stream = torch.cuda.Stream(layout.device) if on_gpu else None  # type: ignore[no-untyped-call]
        recorded = on_gpu and graphs and not central.changes.waits
        self._graphs = StepGraphs(layout.device, self._written) if recorded else None
        self._rate = torch.ones((), device=layout.device)  # read by graphs where the rate varies
        self._users_done: deque[Any] = deque()

    def _rooms_of(self) -> tuple[dict[int, Room], dict[int, Room]]:
        """Memory for the gradients of linear layers' weights: by ``id`` of the parameter, and by variable."""
        rooms, places = {}, {}
        both = zip(trained(self._central), trained(self._module))
        layers = self._module.modules() if self._once else ()
        ids = {id(layer.weight) for layer in layers if isinstance(layer, Linear)}
        for place, (central, parameter) in enumerate(both):
            if id(parameter) in ids:
                places[place] = Room(torch.empty_like(parameter, requires_grad=False))
                rooms[id(central)] = rooms[id(parameter)] = places[place]
        return rooms, places

    def _written(self) -> list[Tensor]:
        """The tensors that a step writes."""
        kept = [] if self._velocity is None else [self._velocity]
        kept += [] if self._moments is None else self._moments.tensors
        return [self._local, self.sums.losses, *kept]

    def _prepare(self, local: LocalTraining) -> None:
        if local.momentum and self._velocity is None:
            self._velocity = self.layout.zeros()
            self._velocities = self.layout.views(self._velocity)
        if local.adaptive is not None and self._moments is None:
            self._moments = Moments(self.layout)
        if local.correction and not self._corrections:
            self._corrections = self.layout.views(self.layout.zeros())
        if self._steps is not None:
            self._steps.prepare(local)

    def _rate_is_read(self, local: LocalTraining) -> bool:
        """Whether steps read the learning rate from memory, so that one graph serves every round."""
        return self._graphs is not None and local.rate_varies

    def clear(self, scaling: ScalesUpdates | None = None) -> None:
        """Reset the sums before a round; make shared tensors in the caller's stream, for which lanes wait."""
        if self._stream is not None and self._steps is None and scaling is not None:
            self._owners = self.layout.owners
        self.sums.vector.zero_()
        self.sums.tally.clear()
        self.sums.losses.zero_()
        self.besides = {}

    @contextlib.contextmanager
    def working(self) -> Any:
        """In this context work goes to the lane's stream, after the caller's earlier work; none on a CPU."""
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self.layout.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield

    def keep_pace(self) -> None:
        """Wait, after each user, until the GPU has finished the user `AHEAD` places before.

        Otherwise the CPU would run ahead and queue batches in pinned memory without a bound.
        """
        if self._stream is None:
            return
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._stream)
        self._users_done.append(done)
        if len(self._users_done) > AHEAD:
            self._users_done.popleft().synchronize()

    def join(self) -> None:
        """Make the caller's further work on the device wait for the lane's work."""
        if self._stream is not None:
            torch.cuda.current_stream(self.layout.device).wait_stream(self._stream)

    def train(self, batches: Iterable[Batch], local: LocalTraining) -> None:
        """Train one user from the central weights. `add` or `update` then uses the local weights."""
        self._prepare(local)
        if self._rate_is_read(local):
            self._rate.fill_(local.learning_rate)
        first = True
        for batch in batches:
            if self._graphs is None:
                self._step(local, first, batch.on(self.layout.device))
            else:
                self._graphs.run(self._step, local.form, first, batch)
            first = False
        if first:  # no data, no update
            self._local.copy_(self._start)

    def correct(self, corrections: Mapping[str, Tensor], local: LocalTraining) -> None:
        """Set the corrections that the next `train` adds to its steps, where ``local.correction`` says."""
        self._prepare(local)
        torch._foreach_copy_(self._corrections, [corrections[name] for name in self.layout.names])

    def gradient(self, batches: Sequence[Batch], local: LocalTraining) -> dict[str, Tensor]:
        """The gradient, by variable, of the mean loss over all these images at the central weights."""
        num_images = sum(len(batch.images) for batch in batches)
        total = [torch.zeros_like(start) for start in self._starts]
        for batch in batches:
            gradients = self._gradients(self._central, batch.on(self.layout.device), local)
            torch._foreach_add_(total, gradients, alpha=len(batch.images) / num_images)
        return dict(zip(self.layout.names, total))

    def _gradients(
        self, module: ImageClassifier, batch: Batch, local: LocalTraining, stepping: bool = False
    ) -> list[Tensor]:
        """Gradients by variable. ``stepping``: whether losses count and layers may make the step (`Room`)."""
        for place, room in self._places.items():
            at_once = stepping and local.is_plain and not self._rate_is_read(local)
            room.after = self._weights[place] if at_once else None
            room.rate, room.done = local.learning_rate, False
        with torch.enable_grad(), gradients_into(self._rooms):
            with local.autocast(self.layout.device):
                outputs, targets = module.outputs(batch.images, batch.targets, batch.crops)
            losses = module.task.image_losses(outputs, targets)
            loss = (losses * batch.shares).sum()
            if stepping:
                number = (batch.shares > 0).sum()
                self.sums.losses += torch.stack([loss.detach().double() * number, number.double()])
            return list(torch.autograd.grad(loss, trained(module)))

    def rehearse(self, local: LocalTraining, sample: Batch) -> None:
        """Record a GPU's graphs, and launch what is not in them. No other lane may work meanwhile."""
        self._prepare(local)
        with self.working():
            if self._graphs is not None:
                self._graphs.record(self._step, local.form, local.batch_size, sample)
            if self._steps is not None:
                self._steps.rehearse(self.sums.vector, self._start)
        self.join()

    def _step(self, local: LocalTraining, first: bool, batch: Batch) -> None:
        """Make one SGD step; the ``first`` starts from the central weights. Images with share 0 are padding.

        Nothing here waits for the device or depends on values, so that a GPU can replay it.
        """
        used = self._first if first else self._moved
        gradients = self._gradients(used.module, batch, local, stepping=True)
        if any(room.done for room in self._places.values()):
            self._descend(gradients, local, first)
        elif self._steps is None or not self._steps.know(local):
            self._step_by_variable([gradient.float() for gradient in gradients], local, first)
            self._moved.refresh()
        else:
            rate = self._rate if self._rate_is_read(local) else None
            velocity = self._velocity if local.momentum else None
            self._steps.step(gradients, local, first, used.weights, self._moved, velocity, rate)

    @torch.no_grad()
    def _step_by_variable(self, gradients: list[Tensor], local: LocalTraining, first: bool) -> None:
        direction = self._direction(gradients, local, first)
        corrections = self._corrections if local.correction == "step" else []
        if local.factors:
            direction = list(torch._foreach_mul(direction, local.factors))
            corrections = list(torch._foreach_mul(corrections, local.factors)) if corrections else []
        if self._rate_is_read(local):
            direction = list(torch._foreach_mul(direction, self._rate))
            corrections = list(torch._foreach_mul(corrections, self._rate)) if corrections else []
        if not first:
            torch._foreach_sub_(self._weights, direction, alpha=local.learning_rate)
        elif self._stream is not None:  # this way needs few launches
            torch._foreach_mul_(direction, -local.learning_rate)
            torch._foreach_add_(direction, self._starts)
            torch._foreach_copy_(self._weights, direction)
        else:
            for weight, start, part in zip(self._weights, self._starts, direction):
                torch.sub(start, part, alpha=local.learning_rate, out=weight)
        if corrections:
            torch._foreach_sub_(self._weights, corrections, alpha=local.learning_rate)

    def _direction(self, gradients: list[Tensor], local: LocalTraining, first: bool) -> list[Tensor]:
        """What the local optimiser steps along, in the place of the gradients or of its momentum."""
        if local.mu and not first:
            difference = torch._foreach_sub(self._weights, self._starts)
            torch._foreach_add_(gradients, difference, alpha=local.mu)
        if local.correction == "gradient":
            torch._foreach_add_(gradients, self._corrections)
        clip_gradients(gradients, local)
        adam, sources = local.adaptive, self._starts if first else self._weights
        if local.weight_decay and not (adam and adam.decoupled):
            torch._foreach_add_(gradients, sources, alpha=local.weight_decay)
        if adam:
            assert self._moments is not None
            gradients = self._moments.direction(gradients, adam, first)
            if adam.decoupled and local.weight_decay:
                torch._foreach_add_(gradients, sources, alpha=local.weight_decay)
        elif local.momentum and first:
            torch._foreach_copy_(self._velocities, gradients)
        elif local.momentum:
            torch._foreach_mul_(self._velocities, local.momentum)
            torch._foreach_add_(self._velocities, gradients)
            return self._velocities
        return gradients

    @torch.no_grad()
    def _descend(self, gradients: list[Tensor], local: LocalTraining, first: bool) -> None:
        """Make a plain gradient step on those variables that their layers have not changed already."""
        sources = self._starts if first else self._weights
        for place, (weight, source, gradient) in enumerate(zip(self._weights, sources, gradients)):
            if place not in self._places or not self._places[place].done:
                torch.sub(source, gradient, alpha=local.learning_rate, out=weight)

    def decay(self, weight: float, local: LocalTraining, scaling: ScalesUpdates | None) -> None:
        """Add the weight decay of one-step users to the sum: ``-lr * decay * central weights`` for each."""
        if not local.weight_decay:
            return
        assert scaling is None, "their norms are not known"
        factors = local.each_factor(len(self._starts))
        for view, start, factor in zip(self.sums.views.values(), self._starts, factors):
            view.add_(start, alpha=-local.learning_rate * factor * local.weight_decay * weight)

    @torch.no_grad()
    def add(self, weight: float, scaling: ScalesUpdates | None) -> None:
        """Add the update of the user just trained, times ``weight`` and its scale, to the sum."""
        if scaling is None:
            length = PIECE if self._stream is None else len(self._local)
            for first in range(0, len(self._local), length):
                piece = slice(first, first + length)
                self.sums.vector[piece].add_(self._local[piece].sub_(self._start[piece]), alpha=weight)
            return
        if self._steps is None:
            self._local.sub_(self._start)
            norms = squared_norms_of(list(torch.split(self._local, list(self.layout.sizes))))
        else:
            norms = self._steps.squared_norms(self._local, self._start)
        scales, tally = scaling.user_scales(list(self.layout.names), norms[None])
        self.sums.tally.append(tally[0])
        if self._steps is not None:
            self._steps.add(self._local, self._start, scales[0], weight, self.sums.vector)
            return
        if self._stream is not None:
            wide = scales[0].float()[self._owners]
            self.sums.vector.add_(torch.where(wide == 0, 0.0, self._local * wide), alpha=weight)
            return
        for view, update, scale in zip(self.sums.views.values(), self._weights, scales[0].tolist()):
            if scale:  # a refused user's update may be infinite
                view.add_(update, alpha=weight * scale)

    def added(self) -> dict[str, Tensor]:
        """The update that `add` just added without scaling, by name, as views that `train` overwrites."""
        return dict(zip(self.layout.names, self._weights))

    @torch.no_grad()
    def update(self) -> dict[str, Tensor]:
        """The update of the user just trained, by name, as views that the next user overwrites."""
        self._local.sub_(self._start)
        return self.added()
