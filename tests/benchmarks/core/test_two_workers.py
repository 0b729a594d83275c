"""Algorithms whose rounds two workers share: they hold what one does. One launch trains a run of each.

test_two_workers DATA DIRECTORY          trains them, as one of the workers of a launcher
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.core.execute import execute
from benchmarks.flair.config import parse
from benchmarks.flair.train import Flair
from dataset.arrays import FloatArray
from pfl_ext import checkpoint
from pfl_ext.algorithms import channel, feddyn, personal_parts, scaffold
from pfl_ext.algorithms.user_vectors import UserVectors
from pfl_ext.workers.distributed import connected
from tests.benchmarks.conftest import killed_at
from tests.benchmarks.core import test_groups_and_graphs as networks
from tests.benchmarks.core import test_personal_runs as personal
from tests.benchmarks.core.test_aggregation_runs import SPOOLED
from tests.benchmarks.core.test_by_loss import QFFL
from tests.benchmarks.core.test_compression_runs import TOP_K
from tests.benchmarks.core.test_control_runs import FEDDYN
from tests.benchmarks.core.test_device_runs import LATE
from tests.benchmarks.core.test_fedbuff import RUN, without_cohort
from tests.benchmarks.core.test_fedma_runs import FEDMA
from tests.benchmarks.core.test_fednas_runs import SEARCH
from tests.benchmarks.core.test_fednas_search import small_cells
from tests.benchmarks.core.test_ifca import IFCA, OPTION, counts
from tests.benchmarks.core.test_own_loop import GOSSIP
from tests.benchmarks.core.test_secure_runs import NAMES
from tests.benchmarks.core.test_split import KEYS
from tests.benchmarks.core.worker_runs import PRIVATE, ROUNDS, SMALL
from tests.benchmarks.run_files import last_checkpoint, lines, results
from tests.benchmarks.sparing import sparingly
from tests.launching import command, run

pytestmark = [pytest.mark.xdist_group("two workers"), pytest.mark.slow]
"""One process runs them all: `both`, which is what is slow, is made once."""

FAST, STOCK = "--runtime.engine=fast", "--runtime.engine=stock"
CONTROLS = {"scaffold": scaffold.CONTROLS, "feddyn": feddyn.FILE, "feddyn, idle": feddyn.FILE}
PERSONAL = ("fedrep", "ditto", "moon")
"""FedPer's users keep what FedRep's do, and pFedMe's what Ditto's do."""
DEVICES = {
    "devices": (FAST, *LATE),
    "few devices": (
        STOCK,
        "--devices.drop_out=0.7",
        "--federated.weighting=users",
        "--federated.cohort_size=2",
    ),
    "private devices": (STOCK, *PRIVATE, "--seed=1", "--devices.drop_out=0.7"),
    "fedbuff": (FAST, *RUN),
    "fedbuff, stock": (STOCK, *RUN),
}
RUNS = {
    "splitfed": (KEYS[0], "--federated.options.variant=splitfed"),
    **{name: (FAST, f"--federated.algorithm={name}", f"{OPTION}drop_out=0.4") for name in NAMES},
    "fednas": (*SEARCH, "--federated.num_rounds=1"),
    "fedma": (FAST, *FEDMA),
    "gossip": (FAST, *GOSSIP),
    "multi_krum": (FAST, *SPOOLED),
    "qffl": (FAST, *QFFL),
    "ifca": (FAST, *IFCA, f"{OPTION}shared=encoder"),
    "top_k, 8": (FAST, *TOP_K, "--federated.cohort_size=8"),
    "top_k, 1": (FAST, *TOP_K, "--federated.cohort_size=1"),
    "scaffold": (FAST, "--federated.algorithm=scaffold"),
    "feddyn": (FAST, *FEDDYN),
    "feddyn, idle": (STOCK, *FEDDYN, "--federated.cohort_size=1"),
    **{name: (FAST, *networks.words(name)) for name in networks.WORDS},
    **{name: (FAST, *personal.words(name)) for name in PERSONAL},
    **DEVICES,
}
"""Where the cohort is one user, one of the workers has nobody to train: on the engine, and in pfl's loop."""
BEGUN = ("feddyn", "fedrep")
"""They were begun by one worker."""
TO_THE_BIT, NEARLY = (1e-6, 1e-7), (1e-5, 1e-6)
"""Relative and absolute differences of each number."""


def main(data: Path, directory: Path, names: Iterable[str] = tuple(RUNS)) -> None:
    """A run of each."""
    torch.set_num_threads(1)
    small = [word for word in SMALL if "engine" not in word]
    with connected("auto", threads=1, timeout=60), small_cells(), sparingly():
        for name in names:
            shared = without_cohort(*small) if "fedbuff" in name else small
            execute(parse([*shared, *RUNS[name], f"--run_dir={directory / name}"]), data, Flair)


@pytest.fixture(scope="module")
def both(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs by one worker, in ``1/NAME``, and by two, in ``2/NAME``."""
    directory = tmp_path_factory.mktemp("both")
    main(mini_file, directory / "1")
    for name in BEGUN:
        with killed_at(2), pytest.raises(KeyboardInterrupt):
            main(mini_file, directory / "2", [name])
    words = ("tests.benchmarks.core.test_two_workers", str(mini_file), str(directory / "2"))
    run(command("torchrun", 2, *words))
    return directory


def held(both: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The last checkpoints of a run by one worker and by two."""
    alone, together = (last_checkpoint(both / workers / name) for workers in "12")
    assert alone.keys() == together.keys()
    last = 2 if name in BEGUN else 0
    assert len(lines(both / "2" / name)[last]["worker_seconds"]) == 2
    return alone, together


@pytest.mark.parametrize(
    ("names", "within"),
    [
        (("splitfed", "fednas", "gossip", "multi_krum", *DEVICES), TO_THE_BIT),
        (("fedma", *NAMES, *networks.WORDS), NEARLY),
    ],
    ids=["to the bit", "nearly"],
)
def test_they_hold_the_same_models(names: Iterable[str], within: tuple[float, float], both: Path) -> None:
    for name in names:
        alone, together = held(both, name)
        for key, tensor in alone.items():
            rtol, atol = within
            torch.testing.assert_close(together[key], tensor, rtol=rtol, atol=atol, msg=f"{name} {key}")
        assert name != "fednas" or len(alone["backbone.alpha_normal"]) == 5


@pytest.mark.parametrize("name", DEVICES)
def test_the_same_devices_report(name: str, both: Path) -> None:
    ours, theirs = (lines(both / workers / name) for workers in "12")
    for key in ("selected", "reported", "lost", "late", "users", "images", "staleness", "virtual_seconds"):
        assert [line.get(key) for line in ours] == [line.get(key) for line in theirs]
    assert name != "few devices" or 1 in [line["reported"] for line in theirs[:-1]], "one worker has nobody"


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


def vectors(both: Path, name: str, file: str, rows: str, part: str = "") -> tuple[FloatArray, FloatArray]:
    """What users keep ``[n, P]``, NaN for one who never trained, by one worker and by two."""
    found = []
    for workers, tensors in zip("12", held(both, name)):
        size = sum(t.numel() for key, t in tensors.items() if key.startswith("model/") and part in key)
        table = np.fromfile(both / workers / name / "checkpoint" / file, "<f4").reshape(-1, size)
        of_users = tensors[rows].numpy()
        found.append(np.where(of_users[:, None] < 0, np.nan, table[of_users]))
    return found[0], found[1]


@pytest.mark.parametrize("cohort", [8, 1])
def test_users_keep_and_send_the_same(cohort: int, both: Path) -> None:
    name = f"top_k, {cohort}"
    alone, together = held(both, name)
    assert [line["users"] for line in lines(both / "2" / name)[:-1]] == [cohort] * ROUNDS
    assert (alone["compression/rows"] >= 0).sum() > cohort
    for key, tensor in alone.items():
        if key.startswith("model/"):
            torch.testing.assert_close(together[key], tensor, rtol=1e-6, atol=1e-7)
    ours, theirs = vectors(both, name, channel.FILE, "compression/rows")
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    difference = np.nanmax(np.abs(ours - theirs)[~np.isnan(ours[:, 0])], axis=1)
    assert np.median(difference) < 1e-6  # one number that two runs round apart may be sent by one alone


@pytest.mark.parametrize("name", CONTROLS)
def test_users_keep_the_same_corrections(name: str, both: Path) -> None:
    one, other = held(both, name)
    alone, together = (corrections(both / workers / name, CONTROLS[name]) for workers in "12")
    assert alone.any()
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert torch.equal(one["algorithm/rows"] >= 0, other["algorithm/rows"] >= 0)
    for key, tensor in one.items():
        if key.startswith("model/") or key == "algorithm/c":
            torch.testing.assert_close(other[key], tensor, rtol=1e-4, atol=1e-5)


def corrections(directory: Path, file: str) -> Tensor:
    """The vectors of the users who have one, ``[n, P]``."""
    tensors = last_checkpoint(directory)
    rows = tensors["algorithm/rows"]
    users = UserVectors(len(rows), len(tensors["algorithm/c"]), directory / "checkpoint" / file)
    users.load(checkpoint.part(tensors, "algorithm/"))
    return torch.stack(
        [torch.tensor(users.read(user)) for user in torch.nonzero(rows >= 0).flatten().tolist()]
    )


@pytest.mark.parametrize("name", PERSONAL)
def test_users_keep_the_same_parts_and_have_the_same_scores(name: str, both: Path) -> None:
    alone, together = held(both, name)
    for key, tensor in alone.items():
        if key.startswith(("model/", "seen")):
            torch.testing.assert_close(together[key], tensor, rtol=1e-5, atol=1e-6)
    part = "fc3" if name == "fedrep" else ""
    first, second = vectors(both, name, personal_parts.FILE, "users/rows", part)
    np.testing.assert_allclose(second, first, rtol=1e-4, atol=1e-5)
    ours, theirs = (results(both / workers / name)["clients"] for workers in "12")
    for group in ours:
        for kind in {"personal", "server"} & ours[group].keys():
            mine, found = ours[group][kind], theirs[group][kind]
            assert found["pooled"] == pytest.approx(mine["pooled"], abs=1e-2)
            for column, spread in mine["users"].items():
                assert found["users"][column] == pytest.approx(spread, abs=1e-2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
