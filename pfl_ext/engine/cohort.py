"""A round's users, trained many at once, and the sum of what they send.

Users with a single local step go through the network together (`one_step`), the others one after another
with weights of their own (`lane`). Both kinds are dealt to workers and lanes beforehand, by predicted work,
so that the order of every floating-point sum, and with it the result, is the same in every repetition.

Letters: U users, P parameters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dataset.files import prefetched
from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.engine.card import begin_thread, fits, has_room, ieee_float32, is_out_of_memory, release
from pfl_ext.engine.cpu.choice import described
from pfl_ext.engine.cpu.layers import CpuLayers, kernels_for, layers_for
from pfl_ext.engine.gpu_layers import GpuLayers
from pfl_ext.engine.lane import Lane
from pfl_ext.engine.layout import Layout
from pfl_ext.engine.one_step import CohortSum, train_one_step
from pfl_ext.engine.plan import MAX_USERS, MAX_USERS_OF_FEATURES, Arrangement, Task, grouped, plan
from pfl_ext.engine.pool import LanePool, Work, as_many, keep
from pfl_ext.engine.probe import fusable, group_size, most_images
from pfl_ext.engine.readers import Readers
from pfl_ext.engine.reading import Reading
from pfl_ext.engine.short_weights import ShortWeights
from pfl_ext.engine.training import Batch, LocalTraining, joined
from pfl_ext.engine.trim import Trimmed
from pfl_ext.engine.watch import Watch
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.features import FeatureClassifier
from pfl_ext.privacy.central import ScalesUpdates
from pfl_ext.rules import Rule

GPU_LANES = 4
"""Streams: on an H200 (README) rounds with 8 or 16 were no faster, and their start took twice as long."""
NO_ROOM = "the device has no memory to train on: choose a smaller network, input or batch"
PLAIN = Rule()


class CohortEngine:
    """Trains cohorts for one central model, whose weights it reads and never writes.

    Args:
        lanes: users trained at the same time; on a CPU each lane is a thread that computes on one core. None:
            as many as torch has threads, or ``GPU_LANES``.
        accumulate: type of the sums over users.
        prefetch: users, or groups of them, read ahead of need by each lane.
        fuse: whether users with one step go through the network together. None: on a CPU. A GPU is four times
            as fast with graphs for them too, as a pass without one is some thousand launches.
        cpu_kernels: on a CPU, convolutions and norms by `cpu`, as its table says; where these cannot be
            compiled, by torch, with a line on the screen.
        rate_varies: whether the users' learning rate may be another in each round.
    """

    def __init__(
        self,
        model: ImageClassifier,
        *,
        lanes: int | None = None,
        accumulate: torch.dtype = torch.float32,
        prefetch: int = 8,
        reader_threads: int = 1,
        fuse: bool | None = None,
        cpu_kernels: bool = True,
        rate_varies: bool = False,
    ) -> None:
        self._device = model.mean.device
        on_cpu, self.on_gpu = (self._device.type == kind for kind in ("cpu", "cuda"))
        self._open = lanes is None, fuse is None
        if lanes is None:
            lanes = torch.get_num_threads() if on_cpu else GPU_LANES
        self.arrangement = Arrangement(lanes, on_cpu if fuse is None else fuse, most_images(model))
        self.central, self._accumulate = model, accumulate
        self._max_users = MAX_USERS_OF_FEATURES if isinstance(model, FeatureClassifier) else MAX_USERS
        self._prefetch, self._rate_varies = prefetch, rate_varies
        self.readers = Readers(reader_threads)
        self._reading = Reading(model.task, self._device)
        self._pool, self._path = LanePool(self._device), 0
        self.kernels = kernels_for(model) if cpu_kernels else None
        """The compiled functions; None: torch computes."""
        self.watch = Watch()
        self._build(False, layers_for(self.kernels, None))

    def _build(self, whole: bool, layers: CpuLayers | GpuLayers | None) -> None:
        self._built = (whole, layers)
        self._trimmed = trimmed = Trimmed(self.central, whole, layers)
        self._model = model = trimmed.model
        self._layout = Layout.of(model)
        start, short = self._layout.gather(model), layers.autocast if isinstance(layers, GpuLayers) else None
        self._first = ShortWeights.of(model, self._layout, start, short)
        self._refresh()
        with ieee_float32(self._device):
            self._fusable = self.arrangement.fuse and fusable(model)
        graphs, count = self._path < 1, self.arrangement.lanes if self._path < 2 else 1
        job = model, self._layout, self._first, self._accumulate, self._fusable, graphs, self._path < 3
        self.lanes = as_many(partial(Lane, *job), count)
        if len(self.lanes) < count:
            self._keep_lanes(len(self.lanes))
        self.readers.most = self.on_gpu * min(self._prefetch, torch.get_num_threads() // len(self.lanes))
        self._max_images: dict[LocalTraining, int] = {}
        self._rehearsed: set[LocalTraining] = set()

    def _refresh(self) -> None:
        """Read the central weights."""
        self._trimmed.refresh()
        self._first.refresh()

    def _prepare(self, local: LocalTraining) -> LocalTraining:
        """Make the network the one that this training needs; the training as it will be done."""
        amp = self._prepare_network(local.amp, self._built[0] or local.moves_all)
        return replace(local, amp=amp, rate_varies=self._rate_varies)

    def _prepare_network(self, precision: torch.dtype | None, whole: bool) -> torch.dtype | None:
        """Returns the type of torch's autocast."""
        layers: CpuLayers | GpuLayers | None = layers_for(self.kernels, precision)
        if self.on_gpu and precision is not None and self._path < 3:
            layers = GpuLayers(precision)
        if (whole, layers) != self._built:
            self._build(whole, layers)
        return precision if layers is None else layers.autocast

    def arithmetic(self, precision: torch.dtype | None) -> str:
        """How training in this type, None being float32, is computed, in one line."""
        autocast = self._prepare_network(precision, self._built[0])
        return described(self._model.trained_part, autocast)

    def take_path(self, number: int) -> None:
        """On a GPU, use this one of `selfcheck.PATHS` from here on."""
        if number != self._path:
            self.close()
            self._path = number
            self._build(self._built[0], None if number == 3 else self._built[1])

    def arrangements(self) -> list[Arrangement]:
        """What may be faster on some processor, beginning with what is; what was asked for stays."""
        as_is, (lanes, fuse) = self.arrangement, self._open
        if self.on_gpu:
            counts = (2 * as_is.lanes, as_is.lanes // 2) if lanes and self._path < 2 else ()
            return [as_is, *(replace(as_is, lanes=count) for count in counts if count)]
        groups = (replace(as_is, images=2 * as_is.images), replace(as_is, images=4 * as_is.images))
        return [as_is, *groups, replace(as_is, fuse=False)] if fuse and self._fusable else [as_is]

    def arrange(self, arrangement: Arrangement) -> None:
        """From here on, every round so."""
        if arrangement != self.arrangement:
            self.close()
            keep(self.lanes, 0)  # else the new lanes would find no room beside those that are given up
            self.arrangement = arrangement
            self._build(*self._built)

    def like(self, model: ImageClassifier) -> CohortEngine:
        """An engine of the same settings for a model, or for another choice of what is trained."""
        return CohortEngine(
            model,
            lanes=self.arrangement.lanes,
            accumulate=self._accumulate,
            prefetch=self._prefetch,
            reader_threads=self.readers.threads,
            fuse=self.arrangement.fuse,
            cpu_kernels=self.kernels is not None,
            rate_varies=self._rate_varies,
        )

    def close(self) -> None:
        """Stop the lanes' threads."""
        self._pool.close()

    def tasks(
        self, members: Sequence[Member], local: LocalTraining, scaling: ScalesUpdates | None = None
    ) -> list[Task]:
        """A whole cohort's tasks, of which each worker then takes its part (`dealt`).

        The same on every worker, so nothing here may depend on a device's free memory: see `_fitting`.
        """
        local = self._prepare(local)
        return grouped(members, self.arrangement.images, self._fuses(local, scaling), self._max_users)

    def _fuses(self, local: LocalTraining, scaling: ScalesUpdates | None) -> bool:
        """Whether one-step users share a pass. With Adam, or with weight decay, an update is no multiple of a
        clipped gradient, whose norm alone is known; a correction is each user's own.
        """
        alone = local.correction is not None or local.adaptive is not None
        return self._fusable and not alone and not (local.weight_decay and scaling is not None)

    def _fitting(self, tasks: Sequence[Task], local: LocalTraining) -> list[Task]:
        """This worker's tasks, with groups divided that its memory cannot hold."""
        most, users = self._most(local), self._max_users
        return [part for task in tasks for part in grouped(task.members, most, task.together, users)]

    def _most(self, local: LocalTraining) -> int:
        """Images of a group, as far as is known."""
        known = self._max_images
        if local.form not in known:
            known[local.form] = group_size(self._model, local, len(self.lanes), self.arrangement.images)
        return known[local.form]

    def train(
        self,
        dataset: FederatedImageDataset,
        tasks: Sequence[Task],
        local: LocalTraining,
        weight_of: Callable[[Member], float],
        scaling: ScalesUpdates | None,
        rule: Rule = PLAIN,
    ) -> CohortSum:
        """Train the users of these tasks and add up what they send, times ``weight_of(member)`` of each.

        ``rule``: of the algorithm, from which ``local`` comes too. ``scaling``: is applied to each update.
        """
        assert scaling is None or rule.sends_update_alone, "what is added to the sum would not be scaled"
        local, begin = self._prepare(local), time.perf_counter()
        members = [member for task in tasks for member in task.members]
        self._refresh()
        with ieee_float32(self._device):
            read = (self._reading.batches(dataset.read(m), local) for m in members if m.num_images)
            self._rehearse(chain.from_iterable(read), local, scaling, self.lanes)
            work = partial(
                self._work, dataset=dataset, local=local, weight_of=weight_of, scaling=scaling, rule=rule
            )
            # a round is a function of its number: it can be begun again
            while not self._has_run(fitting := self._fitting(tasks, local), scaling, work):
                self._shrink(local, any(task.together for task in fitting))
        if self.readers.after(len(self.lanes) * (time.perf_counter() - begin)):
            print(
                f"waiting for images: {self.readers.threads} reader threads for each lane from now on",
                file=sys.stderr,
            )
        first, *others = self.lanes
        for lane in self.lanes:
            lane.join()
        for lane in others:
            first.sums.vector.add_(lane.sums.vector)
        tallies = [tally for lane in self.lanes for tally in lane.sums.tally]
        return CohortSum(
            self._trimmed.expand(first.sums.views),
            len(members),
            sum(m.num_images for m in members),
            torch.stack(tallies).sum(0) if tallies else None,
            self._besides(rule),
        )

    def _besides(self, rule: Rule) -> dict[str, Tensor]:
        total = {name: zeros.to(self._accumulate) for name, zeros in rule.zeros().items()}
        for lane in self.lanes:
            for name, tensor in lane.besides.items():
                total[name] += tensor
        return total

    def _rehearse(
        self, samples: Iterable[Batch], local: LocalTraining, scaling: ScalesUpdates | None, lanes: list[Lane]
    ) -> None:
        """Before the first round on a GPU: record the graphs, and try a group of the size that is planned."""
        if not self.on_gpu or local.form in self._rehearsed or (sample := next(iter(samples), None)) is None:
            return
        self._rehearsed = {local.form}
        print(f"recording training steps as CUDA graphs, for {len(lanes)} lanes", file=sys.stderr)
        for count, lane in enumerate(lanes):
            if not (fits(lane.rehearse, local, sample) and has_room(self._device)):
                self._keep_lanes(count)
                break
        while self._fuses(local, scaling) and not fits(self._try_group, sample, local, scaling):
            self._shrink(local, True)

    def _try_group(self, sample: Batch, local: LocalTraining, scaling: ScalesUpdates | None) -> None:
        most, lane = self._most(local), self.lanes[0]
        users = min(self._max_users, most)
        each = -(-most // users)
        group = joined([Batch(*(t[:1].repeat_interleave(each, 0) for t in sample))] * users)
        with lane.working():
            train_one_step(lane.net, self._model, *group, [0.0] * users, local, scaling, lane.sums)
        torch.cuda.synchronize(self._device)

    def _shrink(self, local: LocalTraining, groups: bool) -> None:
        """Ask for less memory: smaller ``groups`` if there are any, else fewer lanes."""
        most = self._most(local)
        if groups and most > 1:
            self._max_images[local.form] = most // 2
            print(f"out of memory: groups of {most // 2} images from now on", file=sys.stderr)
            release(self._device)
        else:
            self._keep_lanes(len(self.lanes) // 2)

    def _keep_lanes(self, count: int) -> None:
        """Give up the other lanes with all that they hold."""
        if count == 0:
            raise ValueError(NO_ROOM)
        print(f"out of memory: {count} lanes from now on", file=sys.stderr)
        self.close()
        self.arrangement = replace(self.arrangement, lanes=count)
        keep(self.lanes, count)

    def _has_run(self, tasks: Sequence[Task], scaling: ScalesUpdates | None, work: Work) -> bool:
        """Do this work on all these; whether memory was enough."""
        for lane in self.lanes:
            lane.clear(scaling)
        faults = self._pool.run(self.lanes, plan(tasks, len(self.lanes), widen=not self.on_gpu), work)
        for fault in faults:
            if not is_out_of_memory(fault):
                raise fault
        return not faults

    def _work(
        self,
        lane: Lane,
        tasks: Sequence[Task],
        dataset: FederatedImageDataset,
        local: LocalTraining,
        weight_of: Callable[[Member], float],
        scaling: ScalesUpdates | None,
        rule: Rule,
    ) -> None:
        """Train these one after another."""
        read = partial(self._reading.read, dataset, local, rule.whole_gradient)
        threads, begin = self.readers.threads, partial(begin_thread, self._device) if self.on_gpu else None
        ahead = prefetched(read, tasks, ahead=self._prefetch, threads=threads, begin=begin)
        timed = self.watch.iterator("data", self.readers.timed(ahead))
        with lane.working():
            for task, (steps, once, sizes) in zip(tasks, timed):
                weights = [weight_of(m) * rule.scale(m.num_steps) for m in task.members]
                if task.together:
                    with self.watch.charge("training"):
                        train_one_step(
                            lane.net, self._model, steps[0], sizes, weights, local, scaling, lane.sums
                        )
                    lane.decay(sum(weights), local, scaling)
                elif rule.correction is None:
                    with self.watch.charge("training"):
                        lane.train(steps, local)
                    lane.add(weights[0], scaling)
                else:
                    user_id = dataset.partition.user_ids[task.members[0].user]
                    scales = weight_of(task.members[0]), weights[0]
                    self._train_corrected(lane, user_id, steps, once, scales, local, rule)
                lane.keep_pace()

    def _train_corrected(
        self,
        lane: Lane,
        user_id: str,
        steps: list[Batch],
        once: list[Batch],
        weights: tuple[float, float],
        local: LocalTraining,
        rule: Rule,
    ) -> None:
        """Train a user with its correction; ``weights``: of what it sends besides, and of its update."""
        trimmed, user = self._trimmed, rule.user(user_id)

        def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: trimmed.whole(name, t) for name, t in tensors.items()}

        lane.correct({name: trimmed.live(name, t) for name, t in user.correction.items()}, local)
        gradient = whole(lane.gradient(once, local)) if once else None
        with self.watch.charge("training"):
            lane.train(steps, local)
        lane.add(weights[1], None)
        for name, sent in user.finish(whole(lane.added()), len(steps), gradient).items():
            if name not in lane.besides:
                lane.besides[name] = torch.zeros_like(sent, dtype=self._accumulate)
            lane.besides[name].add_(sent, alpha=weights[0])

    def take_losses(self) -> tuple[float, int]:
        """The sum of the losses of all images since this was last asked for, and how many images they were.

        Each image counts in every step that it was in, at the weights of that step.
        """
        total, number = torch.stack([lane.sums.losses for lane in self.lanes]).sum(0).tolist()
        for lane in self.lanes:
            lane.sums.losses.zero_()
        return total, int(number)

    def train_alone(self, dataset: Any, local: LocalTraining) -> dict[str, Tensor]:
        """One user's update, for what must see each; overwritten by the next."""
        local = self._prepare(local)
        lane = self.lanes[0]
        self._refresh()
        batches = list(self._reading.batches(dataset, local))
        with ieee_float32(self._device):
            self._rehearse(batches, local, None, self.lanes[:1])
            with lane.working():
                lane.train(batches, local)
                update = lane.update()
        lane.join()
        return self._trimmed.expand(update)
