"""Algorithms whose rounds two workers share: they hold what one does. One launch trains a run of each.

test_two_workers DATA DIRECTORY          trains them, as one of the workers of a launcher
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.core.execute import execute
from benchmarks.flair.config import parse
from benchmarks.flair.train import Flair
from pfl_ext.algorithms.channel import FILE
from pfl_ext.workers.distributed import connected
from tests.benchmarks.core.test_aggregation_runs import SPOOLED
from tests.benchmarks.core.test_by_loss import QFFL
from tests.benchmarks.core.test_compression_runs import TOP_K
from tests.benchmarks.core.test_fedma_runs import FEDMA
from tests.benchmarks.core.test_fednas_runs import SEARCH
from tests.benchmarks.core.test_fednas_search import small_cells
from tests.benchmarks.core.test_ifca import IFCA, OPTION, counts
from tests.benchmarks.core.test_own_loop import GOSSIP
from tests.benchmarks.core.test_secure_runs import NAMES
from tests.benchmarks.core.test_split import KEYS
from tests.benchmarks.core.worker_runs import ROUNDS, SMALL
from tests.benchmarks.run_files import last_checkpoint, lines
from tests.benchmarks.sparing import sparingly
from tests.launching import command, run

pytestmark = pytest.mark.xdist_group("two workers")

FAST = "--runtime.engine=fast"
RUNS = {
    "splitfed": (KEYS[0], "--federated.options.variant=splitfed"),
    **{name: (FAST, f"--federated.algorithm={name}", f"{OPTION}drop_out=0.4") for name in NAMES},
    "fednas": (*SEARCH, "--federated.num_rounds=1"),
    "fedma": (FAST, *FEDMA),
    "gossip": (FAST, *GOSSIP),
    "multi_krum": (FAST, *SPOOLED),
    "qffl": (FAST, *QFFL),
    "ifca": (FAST, *IFCA, f"{OPTION}shared=encoder"),
    "top_k 8": (FAST, *TOP_K, "--federated.cohort_size=8"),
    "top_k 1": (FAST, *TOP_K, "--federated.cohort_size=1"),
}
"""The last one's cohort is one user, so one of the workers has nobody to train."""
TO_THE_BIT, NEARLY = (1e-6, 1e-7), (1e-5, 1e-6)
"""Relative and absolute differences of each number."""


def main(data: Path, directory: Path) -> None:
    """A run of each."""
    torch.set_num_threads(1)
    with connected("auto", threads=1, timeout=60), small_cells():
        for name, words in RUNS.items():
            small = [word for word in SMALL if FAST in words or "engine" not in word]
            with sparingly():
                execute(parse([*small, *words, f"--run_dir={directory / name}"]), data, Flair)


@pytest.fixture(scope="module")
def both(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs by one worker, in ``1/NAME``, and by two, in ``2/NAME``."""
    directory = tmp_path_factory.mktemp("both")
    main(mini_file, directory / "1")
    words = ("tests.benchmarks.core.test_two_workers", str(mini_file), str(directory / "2"))
    run(command("torchrun", 2, *words))
    return directory


def held(both: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The last checkpoints of a run by one worker and by two."""
    assert len(lines(both / "2" / name)[0]["worker_seconds"]) == 2
    return last_checkpoint(both / "1" / name), last_checkpoint(both / "2" / name)


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("splitfed", TO_THE_BIT),
        ("fednas", TO_THE_BIT),
        ("gossip", TO_THE_BIT),
        ("multi_krum", TO_THE_BIT),
        ("fedma", NEARLY),
        *((name, NEARLY) for name in NAMES),
    ],
)
def test_they_hold_the_same_models(name: str, within: tuple[float, float], both: Path) -> None:
    alone, together = held(both, name)
    for key, tensor in alone.items():
        torch.testing.assert_close(together[key], tensor, rtol=within[0], atol=within[1])
    assert name != "fednas" or len(alone["backbone.alpha_normal"]) == 5


@pytest.mark.parametrize(("name", "parts"), [("qffl", ""), ("ifca", ("shared/", "clusters/"))])
def test_they_hold_the_same_where_users_choose_or_are_weighted_by_losses(
    name: str, parts: str | tuple[str, ...], both: Path
) -> None:
    alone, together = held(both, name)
    for key, tensor in alone.items():
        if key.startswith(parts):
            apart = float((together[key].double() - tensor.double()).norm())
            assert apart <= 1e-5 * float(tensor.double().norm()) + 1e-9, key


def test_the_largest_loss_of_a_user_is_the_same(both: Path) -> None:
    first = [lines(both / workers / "qffl")[0]["largest_user_loss"] for workers in "12"]
    assert first[0] == first[1]


def test_users_choose_the_same_models(both: Path) -> None:
    alone, together = held(both, "ifca")
    assert torch.equal(alone["chosen"], together["chosen"])
    users = [[counts(line) for line in lines(both / workers / "ifca")[:-1]] for workers in "12"]
    assert users[0] == users[1]
    tables = [(both / workers / "ifca" / "clients.csv").read_text().splitlines() for workers in "12"]
    assert [line.split(",")[2] for line in tables[0]] == [line.split(",")[2] for line in tables[1]]


@pytest.mark.parametrize("cohort", [8, 1])
def test_users_keep_and_send_the_same(cohort: int, both: Path) -> None:
    name = f"top_k {cohort}"
    alone, together = held(both, name)
    assert [line["users"] for line in lines(both / "2" / name)[:-1]] == [cohort] * ROUNDS
    assert (alone["compression/rows"] >= 0).sum() > cohort
    for key, tensor in alone.items():
        if key.startswith("model/"):
            torch.testing.assert_close(together[key], tensor, rtol=1e-6, atol=1e-7)
    for user, (a, b) in enumerate(zip(alone["compression/rows"], together["compression/rows"])):
        assert (int(a) < 0) == (int(b) < 0), user
    errors = [kept(both / workers / name, tensors) for workers, tensors in (("1", alone), ("2", together))]
    assert errors[0].shape == errors[1].shape
    difference = np.abs(errors[0] - errors[1]).max(1)
    assert np.median(difference) < 1e-6  # one number that two runs round apart may be sent by one alone


def kept(directory: Path, tensors: dict[str, Tensor]) -> Any:
    """What users keep ``[n, P]``, of those who have taken part."""
    rows = tensors["compression/rows"].numpy()
    length = sum(t.numel() for name, t in tensors.items() if name.startswith("model/backbone"))
    table = np.fromfile(directory / "checkpoint" / FILE, "<f4").reshape(-1, length)
    return table[rows[rows >= 0]]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
