"""Where data lies while it travels between workers, on a pretend card."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import DistNetworkError

from pfl_ext.workers import transport
from pfl_ext.workers.launch import Launch


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


def test_the_first_worker_serves_the_store_where_no_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a scheduler that sets torchrun's variables and starts the workers itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    second = transport.open_transport(Launch("torchrun", rank=1, world_size=2), 1)
    with pytest.raises(DistNetworkError):  # nobody serves it yet
        second.store(0.5)
    first = transport.open_transport(Launch("torchrun", rank=0, world_size=2), 5)
    first.store(5).set("word", "said")
    assert second.store(5).get("word") == b"said"
