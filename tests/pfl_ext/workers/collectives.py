"""What a worker can ask of the others; run by a launcher, with the number of workers that there should be."""

from __future__ import annotations

import sys

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import pytest
import torch
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import get_default_framework_module as get_ops

from pfl_ext.workers.distributed import (
    begin_work,
    connected,
    current,
    from_any,
    from_main,
    is_main,
    tensors_from_main,
    worker_seconds,
)


def sums(rank: int, size: int) -> None:
    """Float32 and float64 tensors are summed together, in place, exactly."""
    tensors = [torch.full((2, 3), 2.0**rank), torch.tensor([2.0**-30 + rank], dtype=torch.float64)]
    returned = get_ops().distributed.all_reduce(tensors)
    assert returned[0] is tensors[0]
    assert torch.equal(tensors[0], torch.full((2, 3), 2.0**size - 1))
    assert tensors[1].dtype == torch.float64
    assert float(tensors[1]) == size * 2.0**-30 + size * (size - 1) / 2
    mean = get_ops().distributed.all_reduce([torch.tensor([float(rank)])], average=True)
    assert float(mean[0]) == (size - 1) / 2


def compressed_sums(rank: int, size: int) -> None:
    """Large tensors within two roundings to 8 bits, the same bits on all workers, small ones exact."""
    workers = current()
    assert workers is not None
    everyone = [torch.randn(70, 31, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    count, large, votes = torch.tensor([1234567.0]), everyone[rank].clone(), torch.full((3,), 0.5 + 2.0**-20)
    workers.compress = True
    workers.sum_model([count], [large, votes])
    workers.compress = False
    assert float(count) == size * 1234567
    assert torch.equal(votes, torch.full((3,), size * (0.5 + 2.0**-20)))
    rounding = 2.0**-8 * (sum(t.abs() for t in everyone) + sum(everyone).abs()) * 1.01  # type: ignore[union-attr]
    assert ((large - sum(everyone)).abs() <= rounding).all()
    assert not torch.equal(large, sum(everyone))  # type: ignore[arg-type]
    assert torch.equal(tensors_from_main({"large": large})["large"], large)


def numbers_from_any(rank: int, size: int) -> None:
    """A signal that only one worker gets reaches all of them."""
    assert from_any(None) is None
    assert from_any(15 if rank == size - 1 else None) == 15
    assert from_any(rank + 1) == size


def words_from_main(rank: int) -> None:
    """JSON, and tensors of any kind."""
    secret = 2**127 + 12345
    assert from_main({"secret": secret} if is_main() else None) == {"secret": secret}
    tensors = {
        "weights": torch.arange(6.0).view(2, 3).bfloat16(),
        "step": torch.tensor(7),
        "nothing": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "wide": torch.tensor([1e-300], dtype=torch.float64),
    }
    got = tensors_from_main(tensors if is_main() else None)
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


def agreement(rank: int, size: int) -> None:
    """All stop with an error that says who differs and how; nobody is out of step afterwards."""
    begin_work(round=3, cohort="1f" if rank != size - 1 else "2e", config="9a")
    with pytest.raises(ValueError, match=f"worker {size - 1} has cohort 2e, worker 0 has 1f$"):
        pytorch_ops.distributed.all_reduce([torch.zeros(4)])
    begin_work(round=3)
    with pytest.raises(ValueError, match=f"worker {size - 1} has size 5"):
        pytorch_ops.distributed.all_reduce([torch.zeros(5 if rank == size - 1 else 4)])
    begin_work(round=4)
    assert float(pytorch_ops.distributed.all_reduce([torch.ones(1)])[0]) == size
    first = worker_seconds()
    assert len(first) == size
    assert all(0 <= s < 60 for s in first)
    pytorch_ops.distributed.all_reduce([torch.ones(1)])
    assert worker_seconds() == first, "a later reduction has waited for the slowest worker"


def main(expected: int) -> None:
    """All of it."""
    with connected("auto", threads=1, timeout=60) as device:
        workers = current()
        assert workers is not None
        assert workers is get_ops().distributed
        rank, size = workers.global_rank, workers.world_size
        assert (size, is_main(), device) == (expected, rank == 0, "cpu")
        sums(rank, size)
        compressed_sums(rank, size)
        numbers_from_any(rank, size)
        words_from_main(rank)
        agreement(rank, size)
        if is_main():
            print(f"ALL WELL with {size} workers")
    assert current() is None


if __name__ == "__main__":
    main(int(sys.argv[1]))
