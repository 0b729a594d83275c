"""Randomness, prefetching and checkpoints."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from dataset.files import prefetched, write_json
from pfl_ext import checkpoint
from pfl_ext.randomness import derive, seed32, stream, torch_stream


def test_streams_differ_in_every_argument_and_repeat_for_the_same() -> None:
    keys: list[tuple[int, str, int | str, int]] = [
        (1, "a", 0, 0),
        (2, "a", 0, 0),
        (1, "b", 0, 0),
        (1, "a", 1, 0),
        (1, "a", 0, 1),
        (1, "a", "0", 0),
    ]
    assert len({derive(*key) for key in keys}) == len(keys)
    assert derive(1, "a", 12) != derive(1, "a", 1, 2)
    assert stream(1, "a", 3).random() == stream(1, "a", 3).random()
    assert torch.rand(2, generator=torch_stream(1, "x")).equal(torch.rand(2, generator=torch_stream(1, "x")))
    assert len({torch_stream(1, "x", i).initial_seed() for i in range(9)}) == 9
    assert 0 <= seed32(5, "x") < 2**32


def test_streams_are_the_same_in_another_process() -> None:
    """No salted hash, which is another in each process: what was drawn in 2026 is drawn again today."""
    assert stream(7, "cohort", 3).integers(10**9) == 512460784


def test_global_generators_are_left_alone() -> None:
    before, torch_before = str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    stream(1, "a").random(5)
    torch_stream(1, "a")
    assert str(np.random.get_state()) == before  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_before)


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_prefetched_keeps_order_and_runs_at_most_so_far_ahead(ahead: int) -> None:
    begun: list[int] = []
    lock, caller = threading.Lock(), threading.current_thread()

    def work(i: int) -> int:
        with lock:
            begun.append(i)
        assert (threading.current_thread() is caller) == (ahead == 0)
        return i * i

    for i, value in enumerate(prefetched(work, range(20), ahead=ahead, threads=2)):
        assert value == i * i
        time.sleep(0.001)
        assert len(begun) <= i + 1 + ahead


def test_work_that_has_not_begun_is_dropped_with_an_error() -> None:
    begun = []
    first = threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        if number == 0:
            raise ValueError
        first.wait(0.2)
        return number

    with pytest.raises(ValueError):  # noqa: PT011
        next(iter(prefetched(work, range(10), ahead=9, threads=1)))
    assert len(begun) <= 3


def test_prefetched_raises_where_the_result_was_due_and_leaves_no_thread() -> None:
    def work(i: int) -> int:
        if i == 2:
            raise ValueError("two")
        return i

    results = prefetched(work, range(10), ahead=4, threads=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_a_checkpoint_holds_tensors_and_state_bit_for_bit(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).to(memory_format=torch.contiguous_format), "n": torch.tensor(7)}
    checkpoint.save(tmp_path / "deep" / "c.safetensors", tensors, {"step": 3, "best": {"score": 0.1}})
    loaded, state = checkpoint.load(tmp_path / "deep" / "c.safetensors")
    assert state == {"step": 3, "best": {"score": 0.1}}
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["c.safetensors"]


def test_a_failed_save_leaves_the_old_checkpoint_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, {"a": torch.zeros(2)}, {"step": 1})

    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", no_space)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(path, {"a": torch.ones(2)}, {"step": 2})
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "c.json", {})
    assert checkpoint.load(path)[1] == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_full_disk_is_an_os_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    path = tmp_path / "c.safetensors"
    checkpoint.save(path, {"a": torch.zeros(2)}, {"step": 1})
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"c\.safetensors cannot be written: .*No space left"):
        checkpoint.save(path, {"a": torch.ones(2)}, {"step": 2})
    assert checkpoint.load(path)[1] == {"step": 1}


def test_a_damaged_checkpoint_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, {"a": torch.zeros(100)}, {"step": 1})
    whole = path.read_bytes()
    for damaged in (whole[:50], whole[:-1], b"", b"\xff" * 64, whole[:8] + b"x" + whole[9:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a whole checkpoint"):
            checkpoint.load(path)


def test_an_optimizer_goes_on_as_if_never_stopped() -> None:
    def steps(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, first: int, last: int) -> None:
        for i in range(first, last):
            parameter.grad = torch.full_like(parameter, float(i))
            optimizer.step()

    one = torch.nn.Parameter(torch.zeros(3))
    whole = torch.optim.Adam([one], lr=0.1)
    steps(whole, one, 1, 6)
    two = torch.nn.Parameter(torch.zeros(3))
    first = torch.optim.Adam([two], lr=0.1)
    steps(first, two, 1, 3)
    second = torch.optim.Adam([two], lr=0.1)
    checkpoint.restore_optimizer(second, checkpoint.optimizer_tensors(first))
    steps(second, two, 3, 6)
    assert torch.equal(one, two)
