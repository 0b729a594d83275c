"""FedBuff as runs: held to its equations in float64, killed and resumed, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest

from benchmarks.core.config.trees import Tree, merge
from benchmarks.core.federated import training_data
from pfl_ext.algorithms import fedbuff
from pfl_ext.devices.fleet import Fleet
from tests.benchmarks.conftest import Refused, Train, killed_at
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import SIZES, USERS, Array, run_of, server, trajectory, vector
from tests.benchmarks.core.test_device_runs import CLASSES_OF_RUN, NUMBERS, SPEEDS
from tests.benchmarks.core.test_groups_and_graphs import at_rate_of, direct_of
from tests.benchmarks.run_files import last_checkpoint, lines, results, timeless
from tests.pfl_ext.devices.test_arrivals import by_plain_loops


def tree_of(concurrency: int, buffer_size: int, **options: Any) -> Tree:
    chosen = {"concurrency": concurrency, "buffer_size": buffer_size, **options}
    return {"federated": {"algorithm": "fedbuff", "options": chosen}, "devices": {"classes": SPEEDS}}


def by_equations(tree: Tree) -> Array:
    """``[steps, P]``: every user keeps a copy of the model that it started from."""
    run_, direct = run_of(tree), direct_of(tree)
    config, data = run_.config, training_data(run_, quadratics.Users(), quadratics.SquaredError())
    options, devices = tree["federated"]["options"], config.devices
    assert devices is not None
    speeds = Fleet(devices, data.partition.user_ids, config.seed).speeds
    assert speeds is not None
    kbit, images = 8 * NUMBERS / 1000, np.array(SIZES) * config.local.num_epochs
    seconds = 3 * images * speeds[:, 0] / 1000 + kbit / speeds[:, 2] + kbit / speeds[:, 1]
    events = by_plain_loops(
        seconds,
        config.seed,
        concurrency=options["concurrency"],
        buffer_size=options["buffer_size"],
        max_staleness=options.get("max_staleness"),
        drop_out=devices.drop_out,
        num_steps=config.federated.num_rounds,
    )
    x, step, seen, draws, oldest = vector(quadratics.module()), server(config), [], 0, 0
    models = [x]
    for number, event in enumerate(events):
        divisor, d = 0.0, np.zeros_like(x)
        for version in sorted({version for _, version in event.jobs}):
            data.set_round(draws)
            at_rate_of(direct, run_, version)
            turns = dict.fromkeys(range(len(SIZES)), 0)
            for user in (user for user, started in event.jobs if started == version):
                update = direct.user(models[version], user, data.user_dataset(user, turns[user]))[0]
                weight = float(SIZES[user]) if config.federated.weighting == "images" else 1.0
                age = 0 if options.get("staleness_weight") == "constant" else number - version
                d, divisor = d + weight * update / np.sqrt(1 + age), divisor + weight
                turns[user] += 1
                oldest = max(oldest, number - version)
            draws += 1
        x = step(x, d / divisor)
        models.append(x)
        seen.append(x)
    assert oldest > 0 or options["concurrency"] == 1, "some updates are old"
    return np.stack(seen)


ASYNC = tree_of(4, 2)
CASES = {
    "by images": ASYNC,
    "by users": merge(ASYNC, USERS),
    "constant": merge(tree_of(4, 2, staleness_weight="constant"), USERS),
    "one by one": merge(tree_of(5, 1), USERS),
    "users who come twice": tree_of(3, 5),
    "momentum": merge(ASYNC, {"server": {"momentum": 0.7, "learning_rate": 0.3}}),
    "falling rates": merge(ASYNC, {"local": {"schedule": "exponential", "schedule_factor": 0.8}}),
    "lost and dropped": merge(tree_of(5, 1, max_staleness=3), {"devices": {"drop_out": 0.3, "sigma": 0.5}}),
}


@pytest.mark.parametrize("engine", ["stock", "fast"])
@pytest.mark.parametrize("name", CASES)
def test_it_steps_as_the_equations_say(
    name: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, expected = trajectory(run_of(CASES[name], engine), tmp_path), by_equations(CASES[name])
    assert quadratics.distances(found, expected).max() < quadratics.TOLERANCE
    assert "pfl's own loop" not in capsys.readouterr().err


def test_what_old_updates_count_makes_a_difference() -> None:
    plain = by_equations(merge(ASYNC, USERS))
    assert quadratics.distances(by_equations(CASES["constant"]), plain).max() > 1e-3


@pytest.mark.parametrize("more", [{}, USERS, {"server": {"optimizer": "adam", "learning_rate": 0.05}}])
def test_one_user_at_a_time_is_fedavg_with_cohorts_of_one(more: Tree, tmp_path: Path) -> None:
    found = trajectory(run_of(merge(tree_of(1, 1), more), "fast"), tmp_path / "fedbuff")
    alone = merge(more, {"federated": {"cohort_size": 1}})
    fedavg = trajectory(run_of(alone, "fast"), tmp_path / "fedavg")
    assert quadratics.distances(found, fedavg).max() < quadratics.TOLERANCE


OPTIONS = "--federated.options."
WORDS = ("--federated.algorithm=fedbuff", f"{OPTIONS}concurrency=6", f"{OPTIONS}buffer_size=2")
RUN = (*WORDS, *CLASSES_OF_RUN, "--federated.weighting=users", "--devices.drop_out=0.2")


def without_cohort(*argv: str) -> list[str]:
    return [word for word in argv if not word.startswith("--federated.cohort_size")]


@pytest.fixture
def asynchronous(train: Train, monkeypatch: pytest.MonkeyPatch) -> Train:
    """`train`, with no size of cohorts, which FedBuff has not."""
    from tests.benchmarks import conftest

    monkeypatch.setattr(conftest, "SMALL", tuple(without_cohort(*conftest.SMALL)))
    return train


def test_it_is_killed_and_goes_on_bit_for_bit(asynchronous: Train) -> None:
    argv = (*RUN, "--federated.num_rounds=5", "--server.optimizer=adam", "--server.learning_rate=0.01")
    whole = asynchronous(*argv, name="whole")
    with killed_at(3):
        directory = asynchronous(*argv, code=130)
    assert len(lines(directory)) == 3
    kept = last_checkpoint(directory)
    versions = {name.split("/")[1] for name in kept if name.startswith(fedbuff.VERSIONS)}
    assert "3" in versions
    assert len(versions) > 1, "somebody trains from an older one"
    asynchronous(*argv)
    assert timeless(directory) == timeless(whole)
    for key in ("model_sha256", "val", "test", "last", "traffic"):
        assert results(directory)[key] == results(whole)[key]


def test_lines_say_how_old_updates_were_and_when_the_step_was_made(asynchronous: Train) -> None:
    directory = asynchronous(*RUN, f"{OPTIONS}max_staleness=1", "--federated.num_rounds=12")
    rounds, size = lines(directory)[:-1], results(directory)["traffic"]["up"]
    assert [line["virtual_seconds"] for line in rounds] == sorted(line["virtual_seconds"] for line in rounds)
    for key in ("lost", "late", "staleness"):
        assert any(line[key] for line in rounds), key
    for line in rounds:
        assert line["users"] == line["reported"] == 2
        assert 0 <= line["staleness"] <= line["staleness_max"] <= 1
        assert line["selected"] == line["reported"] + line["late"] + line["lost"]
        assert line["bytes_down"] == size * line["selected"]
        assert line["bytes_up"] == size * (line["reported"] + line["late"])
        assert line["train_loss"] > 0
        assert line["images"] > 0


REFUSED = (
    (WORDS, "needs the speeds of devices: set devices.classes or devices.capacities"),
    ((*WORDS, "--devices.drop_out=0.1"), "needs the speeds of devices: set devices.classes or"),
    ((*RUN, "--devices.deadline_s=9", "--devices.late=drop"), "devices.deadline_s applies to rounds with a"),
    ((*RUN, "--devices.over_selection=1.5"), "devices.over_selection applies to rounds with a cohort"),
    (
        (*RUN, "--devices.stragglers=0.5", "--devices.late=drop", "--local.num_epochs=2"),
        "devices.stragglers applies to rounds with a cohort, which fedbuff does",
    ),
    ((*RUN, "--devices.capacities=none.csv"), "devices.classes and devices.capacities both set speeds"),
    ((*RUN, f"{OPTIONS}concurrency=13"), "federated.options.concurrency is 13, but there are only 12"),
    ((*RUN, f"{OPTIONS}concurrency=0"), "federated.options.concurrency is '0'"),
    ((*RUN, f"{OPTIONS}buffer_size=0"), "federated.options.buffer_size is '0'"),
    ((*RUN, f"{OPTIONS}staleness_weight=linear"), "federated.options.staleness_weight is 'linear'"),
    ((*RUN, f"{OPTIONS}max_staleness=-1"), "federated.options.max_staleness is '-1'"),
    ((*RUN, "--federated.cohort_size=4"), "--federated.cohort_size has no effect where federated.algorithm"),
    ((*RUN, "--federated.replacement=true"), "never trains a user twice at one time: set federated.replac"),
    ((*RUN, "--federated.sampling=proportional"), "draws all users with equal probability: set"),
    (
        (*RUN, f"{OPTIONS}max_staleness=0", f"{OPTIONS}staleness_weight=constant"),
        "federated.options.staleness_weight has no effect if",
    ),
    ((*RUN, "--federated.mu=0.1"), "--federated.mu has no effect where federated.algorithm is fedbuff"),
    ((*RUN, "--compression.kind=sign"), "compression.kind is sign, but federated.algorithm fedbuff does"),
    ((*RUN, "--aggregation.kind=median"), "federated.algorithm fedbuff does not support it"),
    ((*RUN, "--attack.kind=sign_flip"), "federated.algorithm fedbuff does not support it"),
    ((*RUN, "--config=pfl-r-17"), "privacy refuses "),
    ((*RUN, "--local_privacy.epsilon=4"), "local_privacy refuses "),
)


@pytest.mark.usefixtures("asynchronous")
@pytest.mark.parametrize("argv, message", REFUSED)
def test_what_it_cannot_do_is_refused_in_one_line(
    argv: tuple[str, ...], message: str, refused: Refused
) -> None:
    refused(message, *argv)


@pytest.mark.usefixtures("asynchronous")
def test_versions_that_have_no_room_are_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfl_ext.models.memory.physical_memory", lambda: 100_000)
    message = "fedbuff keeps up to 3 versions of the model, which needs up to 0.0 GB of memory"
    refused(message, *RUN, f"{OPTIONS}max_staleness=2")
