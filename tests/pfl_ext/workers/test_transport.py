"""Where data lies while it travels between workers, on a pretend card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pfl_ext.workers import transport


class OnCard(Tensor):
    """A tensor that leaves its card only by `cpu`."""

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


@pytest.mark.parametrize("nccl", [True, False])
def test_sums_travel_from_card_to_card_by_nccl_and_by_way_of_the_cpu_without_it(
    nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo cannot read a card's memory, and NCCL no other."""
    carried: list[type[Tensor]] = []

    def three_workers(flat: Tensor) -> None:
        carried.append(type(flat))
        flat.mul_(3)

    monkeypatch.setattr("torch.distributed.all_reduce", three_workers)
    own = object.__new__(transport._TorchTransport)
    own._nccl = nccl
    flat = torch.arange(4.0).as_subclass(OnCard)
    own.sum_(flat)
    assert carried == [OnCard if nccl else Tensor]
    assert flat.tolist() == [0, 3, 6, 9], "the sum comes back to where the data was"
