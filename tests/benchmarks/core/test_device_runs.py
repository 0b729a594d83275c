"""Runs on slow and unreliable devices: held to their equations, killed and resumed, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import pytest
import torch

from benchmarks.core.config.trees import merge
from benchmarks.flair.config import parse
from pfl_ext import checkpoint
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.devices.fleet import Traffic
from pfl_ext.devices.turnout import Turnouts
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import CLASSES, SIDE, Direct, run_of, trajectory
from tests.benchmarks.core.test_privacy_matrix import BOUND, CENTRAL, moved
from tests.benchmarks.run_files import error_line, last_checkpoint, lines, results, timeless

SPEEDS = {
    "fast": {"share": 0.6, "ms_per_sample": 10, "kbps_up": 100, "kbps_down": 100},
    "slow": {"share": 0.4, "ms_per_sample": 40, "kbps_up": 100, "kbps_down": 100},
}
NUMBERS = 4 * CLASSES * (3 * SIDE * SIDE + 1)
PARTIAL = {"classes": SPEEDS, "late": "partial", "deadline_s": 0.6}
DEVICES: dict[str, Any] = {
    "partial": PARTIAL,
    "drop": {**PARTIAL, "late": "drop"},
    "drop-outs": {"drop_out": 0.4},
    "first": {"classes": SPEEDS, "over_selection": 1.6, "sigma": 0.5},
    "stragglers": {"stragglers": 0.6, "late": "partial"},
}
ALGORITHMS = (
    "fedavg, images",
    "fedavg, users",
    "fedavgm",
    "fedprox, mu 2",
    "fednova",
    "fednova, momentum",
    "fedir",
    "scaffold II",
    "scaffold II, images",
    "feddyn",
    "feddyn, alpha 2, images",
)


class OnDevices(Direct):
    """The equations for those who report."""

    def mean_update(self, x: Any, data: FederatedImageDataset) -> Any:
        config = self.run.config
        assert config.devices is not None
        if data.turnouts is None:
            factor = 2 if config.federated.algorithm == "scaffold" else 1
            sent = Traffic(factor * NUMBERS, factor * NUMBERS + 4 * (config.federated.algorithm == "fednova"))
            size, ids = config.federated.cohort_size, data.partition.user_ids
            data.turnouts = Turnouts(config.devices, data, ids, cohort_size=size, seed=config.seed, sent=sent)
        if not len(data.cohort(config.federated.cohort_size)):
            return None
        return super().mean_update(x, data)

    def trajectory(self) -> Any:
        step = quadratics.server

        def skipping(config: Any) -> Any:
            real = step(config)
            return lambda x, update: x if update is None else real(x, update)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quadratics, "server", skipping)
            return super().trajectory()


CASES = [(name, "partial", engine) for name in ALGORITHMS for engine in ("stock", "fast")]
CASES += [(name, kind, "fast") for name in ("fedavg, images", "fednova", "scaffold II") for kind in DEVICES]


@pytest.mark.parametrize("name, devices, engine", dict.fromkeys(CASES))
def test_who_reports_is_averaged_as_the_equations_say(
    name: str, devices: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = merge(quadratics.ALGORITHMS[name], {"devices": DEVICES[devices]})
    tree = merge(tree, {"federated": {"cohort_size": 3}})
    expected = OnDevices(run_of(tree)).trajectory()
    found = trajectory(run_of(tree, engine), tmp_path)
    assert quadratics.distances(found, expected).max() < quadratics.TOLERANCE
    assert "pfl's own loop" not in capsys.readouterr().err
    plain = Direct(run_of({key: value for key, value in tree.items() if key != "devices"})).trajectory()
    assert quadratics.distances(found, plain).max() > 1e-3, "devices make a difference"


CLASSES_OF_RUN = (
    "--devices.classes.fast.share=0.5",
    "--devices.classes.fast.ms_per_sample=5",
    "--devices.classes.fast.kbps_up=1000",
    "--devices.classes.fast.kbps_down=1000",
    "--devices.classes.slow.share=0.5",
    "--devices.classes.slow.ms_per_sample=50",
    "--devices.classes.slow.kbps_up=1000",
    "--devices.classes.slow.kbps_down=1000",
)
LATE = (*CLASSES_OF_RUN, "--devices.deadline_s=2.5", "--devices.late=partial", "--devices.drop_out=0.3")


@pytest.mark.parametrize(("algorithm", "engine"), [("fedavg", "fast"), ("fednova", "stock")])
def test_devices_that_always_report_are_a_plain_run_bit_for_bit(
    algorithm: str, engine: str, train: Train
) -> None:
    argv = (f"--runtime.engine={engine}", f"--federated.algorithm={algorithm}")
    plain = train(*argv, name="plain")
    devices = train(*argv, *CLASSES_OF_RUN, name="devices")
    ours, theirs = (last_checkpoint(d) for d in (devices, plain))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    more = {"selected", "reported", "lost", "late", "bytes_down", "bytes_up", "virtual_seconds"}
    for line, plain_line in zip(timeless(devices)[:-1], timeless(plain)[:-1]):
        assert {k: v for k, v in line.items() if k not in more} == plain_line
        assert more <= set(line)
    sent = results(plain)["traffic"]
    last = lines(devices)[2]
    assert (last["bytes_down"], last["bytes_up"]) == (4 * sent["down"], 4 * sent["up"])


def test_it_is_killed_and_goes_on_bit_for_bit(train: Train) -> None:
    argv = (*LATE, "--federated.algorithm=scaffold", "--federated.num_rounds=4")
    whole, _ = killed_and_resumed(train, 2, *argv)
    seconds = [line["virtual_seconds"] for line in lines(whole) if "virtual_seconds" in line]
    assert seconds == sorted(set(seconds)), "the clock goes on"
    assert all(line["users"] == line["reported"] for line in lines(whole)[:-1])
    assert any(line["lost"] for line in lines(whole)[:-1])


SGD = ("--server.optimizer=sgd", "--server.learning_rate=1", "--server.momentum=0.5")


def test_a_round_in_which_nobody_reports_changes_nothing_but_the_time(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of such rounds alone is refused."""
    argv = (*CLASSES_OF_RUN, "--devices.deadline_s=0.001", "--devices.late=drop", *SGD)
    train(*argv, code=2)
    assert "devices.deadline_s is 0.001, but the fastest user needs " in error_line(capsys)
    monkeypatch.setattr(Turnouts, "check_deadline", lambda _: None)
    directory = train(*argv)
    first, second, third, _ = lines(directory)
    assert [line["virtual_seconds"] for line in (first, second, third)] == [0.001, 0.002, 0.003]
    assert first["val"] == third["val"]
    assert (first["users"], first["late"], first["bytes_up"]) == (0, 4, 0)


def test_local_privacy_where_nobody_reports_sends_nothing(train: Train) -> None:
    """And whoever is drawn counts as one who took part, in every figure."""
    words = (
        *(
            "--local_privacy.mechanism=laplace",
            "--local_privacy.noise_seed=run",
            "--federated.weighting=users",
        ),
        *("--devices.drop_out=0.9", "--federated.cohort_size=1", "--federated.num_rounds=4", *SGD),
    )
    whole, _ = killed_and_resumed(train, 3, *words, draw=True)
    reported = [line["reported"] for line in lines(whole)[:-1]]
    assert 0 in reported
    for line, after, count in zip(lines(whole), lines(whole)[1:], reported):
        assert line["privacy"]["users"] == count
        assert (line["val"] == after["val"]) == (count == 0)
    said = checkpoint.read_json(whole / "privacy.json")
    assert said["rounds_done"] == 4
    assert said["participations_at_most"]["so_far"] == said["participations_at_most"]["at_end"]
    assert said["epsilon_spent"] == said["epsilon_at_end"]


def test_a_private_sum_moves_by_the_bound_at_most_whoever_drops_out(tmp_path: Path) -> None:
    distances = []
    for seed in range(2, 8):
        words = (*(w for w in CENTRAL if "--seed" not in w), f"--seed={seed}", "--devices.drop_out=0.5")
        distance, rounding = moved(words, tmp_path / str(seed))
        assert distance <= BOUND + rounding
        distances.append(distance > rounding)
    assert 0 < sum(distances) < 6, "the user took part at some seeds"


SLOW_LINK = (
    "--devices.classes.a.share=1",
    "--devices.classes.a.ms_per_sample=1",
    "--devices.classes.a.kbps_up=100",
    "--devices.classes.a.kbps_down=100",
    "--devices.deadline_s=15",
    "--devices.late=drop",
)
"""A user of FedAvg needs 10.6 s; SCAFFOLD sends twice as much each way."""
REFUSED = (
    (["--devices.drop_out=1"], "devices.drop_out is '1'"),
    (["--devices.dropout=0.1"], "there is no config key devices.dropout; did you mean devices.drop_out?"),
    (["--devices.classes.a.share=1"], "devices.classes.a needs exactly the keys share, ms_per_sample"),
    (["--devices.capacities=none.csv"], "devices.capacities none.csv: no such file"),
    (["--devices.stragglers=0.5", "--devices.late=drop", "--local.num_epochs=1"], "set local.num_epochs to"),
    (["--devices.drop_out=0.1", "--federated.replacement=true"], "devices needs each user at most once in"),
    (["--devices.drop_out=0.1", "--mode=centralised"], "has no effect where mode is centralised"),
    (
        ["--devices.drop_out=0.1", "--federated.algorithm=hierarchical"],
        "does not support it: set devices to none, or choose fedavg or",
    ),
    (
        ["--devices.drop_out=0.1", "--federated.algorithm=scaffold", "--federated.scaffold_option=I"],
        "SCAFFOLD's option I needs one more pass over the images, which",
    ),
    (
        [*SLOW_LINK, "--federated.algorithm=scaffold"],
        "devices.deadline_s is 15, but the fastest user needs 21.2 s",
    ),
    ([*CLASSES_OF_RUN, "--devices.over_selection=4"], "draws 16 users, but there are only 12"),
    (["--config=pfl-r-17", *LATE], "privacy refuses devices.deadline_s = 2.5"),
    (["--config=pfl-r-17", *CLASSES_OF_RUN, "--devices.over_selection=2"], "refuses devices.over_selection"),
)


@pytest.mark.parametrize("argv, message", REFUSED)
def test_what_it_cannot_do_is_refused_in_one_line(argv: list[str], message: str, refused: Refused) -> None:
    refused(message, *argv)


def test_files_of_speeds_are_in_the_config_by_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("client,ms_per_sample,kbps_up,kbps_down\na,1,1,1\n")
    devices = parse(["--config=fl-r-17", f"--devices.capacities={path}"]).config.devices
    assert devices is not None
    assert len(devices.capacities_sha256 or "") == 64
    path.write_text(path.read_text() + "b,1,1,1\n")
    other = parse(["--config=fl-r-17", f"--devices.capacities={path}"]).config.devices
    assert other is not None
    assert other.capacities_sha256 != devices.capacities_sha256
