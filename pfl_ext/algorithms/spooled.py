"""Rounds whose updates are collected in a file on disk, to be combined by an aggregation rule.

Each worker writes its users' updates to a file of its own. Worker 0 then receives them one after another,
applies the rule, and sends the result to all. A user's row is its place in the cohort, so the result is the
same on any number of workers. The file is not needed after the round. A user without images sends nothing. An
update that is not finite is left out and counted.

Letters: n users of a cohort, P numbers of an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.context import CentralContext, UserContext
from pfl.metrics import Metrics, StringMetricName, Weighted, get_overall_value
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from dataset.arrays import IntArray
from pfl_ext.aggregation.norm_bound import BOUNDED
from pfl_ext.aggregation.rule import AggregationRule
from pfl_ext.aggregation.spool import Spool
from pfl_ext.algorithms.flat_variables import FlatVariables
from pfl_ext.attacks.attack import Attackers
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.randomness import stream
from pfl_ext.stage import Stage
from pfl_ext.workers.distributed import current, is_main, tensors_from_main

LEFT_OUT = StringMetricName("updates left out")
"""A round's metric: the number of updates that were not finite."""


def line_of_rule(metrics: Metrics) -> dict[str, Any]:
    """What ``metrics.jsonl`` says about a round's aggregation rule, if it notes anything."""
    values = {str(name): get_overall_value(value) for name, value in metrics}
    line: dict[str, Any] = {}
    if str(BOUNDED) in values:
        line["bounded"] = round(values[str(BOUNDED)], 6)
    if str(LEFT_OUT) in values:
        line["left_out"] = int(values[str(LEFT_OUT)])
    return line


class SpooledRounds(Stage):
    """The postprocessor before the weighting. It computes the round's update by a rule.

    Args:
        rule: combines many updates into one.
        users: the run's users.
        module: the network.
        names: the variables that are sent.
        attackers: users who see all other updates before they send theirs; None: there are none.
        seed: the run's seed.
        by_images: whether an update's weight is its user's number of images, for a rule with weights.
        folder: the folder for the updates' file; None: that of temporary files.
    """

    def __init__(
        self,
        rule: AggregationRule,
        users: FederatedImageDataset,
        module: nn.Module,
        names: Sequence[str],
        attackers: Attackers | None,
        *,
        seed: int,
        by_images: bool,
        folder: Path | None,
    ) -> None:
        self._variables = FlatVariables(module, names)
        self._rule, self._attackers, self._seed, self._folder = rule, attackers, seed, folder
        self._by_images = by_images and rule.weighs
        self._numbers = users.partition.numbers
        self._round, self._cohort = 0, np.zeros(0, np.int64)

    def begin(self, number: int, cohort: IntArray) -> None:
        """Begin round ``number`` of these users; all workers call this."""
        super().begin(number, cohort)
        self._round, self._cohort = number, cohort
        self._places = {user: place for place, user in enumerate(cohort.tolist())}
        self._spool = Spool(len(cohort), self._variables.length, self._folder)

    def end(self) -> None:
        """End the round; all workers call this."""
        super().end()
        del self._spool

    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Write the update to the file, and put empty tensors in its place into the sum."""
        self.check_open()
        images = user_context.num_datapoints
        if images:
            place = self._places[self._numbers[str(user_context.user_id)]]
            flat = self._variables.flat(dict(stats.items()))
            self._spool.write(place, flat.detach().cpu().numpy(), float(images) if self._by_images else 1.0)
        for name in self._variables.shapes:
            stats[name] = stats[name].new_zeros(0)
        return stats, Metrics()

    def postprocess_server(
        self, *, stats: MappedVectorStatistics, central_context: CentralContext, aggregate_metrics: Metrics
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Replace the sum by the rule's update, with weight 1."""
        device = next(iter(stats.values())).device
        self._gather(device)
        found: dict[str, Tensor] = {}
        if is_main():
            update, left_out = self._one_update()
            found = {"update": update, "left out": torch.tensor(left_out)}
        found = tensors_from_main(found)
        for name, part in self._variables.named(found["update"].to(device)).items():
            stats[name] = part
        stats.weight = 1.0
        return stats, Metrics([(LEFT_OUT, Weighted.from_unweighted(float(found["left out"])))])

    def _gather(self, device: torch.device) -> None:
        """With several workers, copy all rows into worker 0's file."""
        workers = current()
        if workers is None:
            return
        for place in range(len(self._cohort)):
            mine = self._spool.weights[place] > 0
            row = (
                torch.from_numpy(self._spool.read(place).copy())
                if mine
                else torch.zeros(self._variables.length)
            )
            weight, vector = torch.tensor([self._spool.weights[place]], device=device), row.to(device)
            workers.all_reduce([weight, vector])
            if is_main() and float(weight) and not mine:
                self._spool.write(place, vector.float().cpu().numpy(), float(weight))

    def _one_update(self) -> tuple[Tensor, int]:
        """The rule's update ``[P]`` float32, and the number of updates that were left out.

        Raises:
            ValueError: when too few updates remain for the rule.
        """
        spool = self._spool
        if self._attackers is not None:
            rows = spool.finite_rows()
            bad = self._attackers.among(self._cohort[rows])
            self._attackers.attack.collude(spool, rows[~bad], rows[bad])
        rows = spool.finite_rows()
        left_out = len(spool.written_rows()) - len(rows)
        size = getattr(self._rule.chosen, "bucket_size", 1)
        if size > 1 and len(rows):
            order = stream(self._seed, "aggregation buckets", self._round).permutation(rows)
            groups = [np.sort(order[first : first + size]) for first in range(0, len(order), size)]
            spool = spool.bucketed(groups, self._folder)
            rows = spool.finite_rows()
        if not len(rows):
            return torch.zeros(self._variables.length), left_out
        if not self._rule.works_with(len(rows)):
            raise ValueError(
                f"round {self._round} has only {len(rows)} finite updates, but this aggregation needs "
                f"{self._rule.least()}: lower aggregation.options.tolerated, or raise "
                "federated.cohort_size"
            )
        update: Any = self._rule.aggregate(spool, rows).astype(np.float32)
        return torch.from_numpy(update), left_out
