"""Every figure and sentence about a guarantee holds for every sampler, mechanism, band and kind of run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pfl.common_types import Population
from pfl.context import CentralContext

from benchmarks.core.config.trees import Tree
from benchmarks.core.ledger import CentralLedger
from benchmarks.core.privacy_statement import (
    USERS,
    ProtectedUnit,
    central_paragraph,
    describe_epsilon,
    rounded_up,
)
from benchmarks.core.secret import open_secret, public_secret
from benchmarks.flair.config import parse
from pfl_ext.checkpoint import read_json
from pfl_ext.privacy.accounting import Calibration, PrivacyConfig
from pfl_ext.privacy.banded import BandedFactor
from pfl_ext.privacy.central import AdaptivePrivateMean
from pfl_ext.privacy.mechanisms import BOUND_RANGE
from tests.benchmarks.conftest import Train
from tests.benchmarks.run_files import results


def calibration(**config: Any) -> Calibration:
    """Twenty rounds of 20 of 2,000 users: a user of a circle takes part once."""
    return PrivacyConfig(epsilon=8, delta=1e-5, **config).calibrate(2000, 20, 20)


def test_five_runs_let_a_user_of_a_circle_take_part_five_times() -> None:
    """A user who comes once in a run of 20 rounds comes five times in five runs, not once in 100 rounds."""
    system = calibration(mechanism="gaussian", sampler="cyclic").executed
    assert system.participations(20) == system.participations(100) == 1
    alone, together = system.epsilon_after(20), system.epsilon_of_runs(5, 20)
    assert together == system.epsilon_after(500), "500 rounds are five turns of the circle"
    assert together > 2 * alone


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_five_runs_of_drawn_cohorts_are_one_run_of_five_times_the_rounds(sampler: Any) -> None:
    system = calibration(mechanism="gaussian", sampler=sampler).executed
    assert system.epsilon_of_runs(5, 20) == system.epsilon_after(100)
    assert system.epsilon_of_runs(1, 20) == system.epsilon_after(20)


@pytest.mark.parametrize(
    "value, text",
    [(1.9941, "2"), (0.6041, "0.605"), (2.0, "2"), (0.01, "0.01"), (8.4026e-6, "8.41e-06"), (123.2, "124")],
)
def test_an_upper_bound_is_never_printed_below_itself(value: float, text: str) -> None:
    assert rounded_up(value) == text
    assert float(rounded_up(value)) >= value
    assert describe_epsilon(value) == f"epsilon = {text}"


@pytest.mark.parametrize(
    ("cohort", "end"),
    [
        (None, "The guarantee is for the model after every round; other figures are not covered by it."),
        (100, "The guarantee of the run itself is for the model after every round; other figures are not "
         "covered by it."),
        (5000, "The run itself guarantees nothing."),
    ],
)  # fmt: skip
def test_a_run_without_a_meaningful_epsilon_claims_no_guarantee(cohort: int | None, end: str) -> None:
    config = PrivacyConfig(
        epsilon=2, delta=1e-5, noise_cohort_size=cohort, noise_population=None if cohort is None else 41131
    )
    text = central_paragraph(config.calibrate(600, 20, 60), USERS, False)
    assert text.endswith(end)
    assert ("guarantee is" in text or "guarantee of" in text) != ("no meaningful epsilon" in text)


@pytest.mark.parametrize("mechanism", ["gaussian", "adaptive"])
def test_the_paragraph_says_how_large_the_noise_of_a_round_is_with_a_band(mechanism: Any) -> None:
    """With a band the noise of one round is larger than the independent noise that it is made from."""
    made = calibration(mechanism=mechanism, sampler="cyclic", band=8, indicator_std_fraction=5.0)
    text = central_paragraph(made, USERS, False)
    multiplier = made.value_noise_multiplier
    largest = multiplier * BandedFactor(20, 8).noise_scales.max()
    assert largest > 1.3 * multiplier
    assert f"independent noise with a standard deviation of {multiplier:.4g} times the bound" in text
    assert f"in one round up to {largest:.4g} times" in text
    assert (
        f"Gaussian noise with a standard deviation of {multiplier:.4g} times the bound was added" not in text
    )


def ledger(directory: Path, *argv: str, secret: bool = False) -> CentralLedger:
    """The ledger of a run with 2,000 users."""
    config = parse(["--config=pfl-r-17", *argv]).config
    drawn = open_secret(directory, "config", "data") if secret else public_secret(directory, 1)
    return CentralLedger(config, 2000, ProtectedUnit(), drawn, directory)


def written(directory: Path, *argv: str, rounds: int = 20, secret: bool = False) -> Tree:
    """``privacy.json`` after so many rounds."""
    ledger(directory, *argv, secret=secret).write(rounds, [])
    return read_json(directory / "privacy.json")


SHORT = ("--federated.num_rounds=20", "--federated.cohort_size=20", "--privacy.noise_cohort_size=none")
WIDE = (*SHORT, "--privacy.mechanism=gaussian", "--privacy.noise_population=none")


def test_no_guarantee_is_claimed_of_noise_that_anybody_can_subtract(tmp_path: Path) -> None:
    assert "no protection" in written(tmp_path, *WIDE)["claim"]
    assert written(tmp_path / "secret", *WIDE, secret=True)["claim"].startswith(
        "as_executed is the guarantee"
    )


def test_a_finished_paragraph_does_not_say_that_the_secret_is_gone_while_it_lies_there(
    tmp_path: Path,
) -> None:
    """It is written with the last round; the secret is deleted after that, and a kill may come between."""
    paragraph = written(tmp_path, *WIDE, secret=True)["paragraph"]
    assert "was deleted" not in paragraph
    assert "which the run deletes after its last file" in paragraph


def test_the_warning_of_a_large_delta_names_the_population_that_it_follows_from(tmp_path: Path) -> None:
    words = (*WIDE, "--privacy.noise_population=3000", "--privacy.noise_cohort_size=20")
    statement = written(tmp_path, *words)
    assert statement["delta"] == pytest.approx(3000**-1.1)
    assert "N^-1.1 of 3,000 users" in statement["warning"]


def test_a_public_release_says_that_the_screen_is_not_covered(tmp_path: Path) -> None:
    statement = written(tmp_path, *WIDE, "--privacy.release=public", secret=True)
    assert any("screen" in text for text in statement["not_covered"])


def test_a_statement_says_that_the_others_keep_their_places_and_so_their_crops(tmp_path: Path) -> None:
    """Another user's crops, drawn by its place and a seed that may be public, would move its whole update."""
    assert any("leaves its place empty" in text for text in written(tmp_path, *WIDE)["not_covered"])


def test_what_devices_and_a_norm_bound_write_of_each_round_is_not_covered(tmp_path: Path) -> None:
    for number, more in enumerate((["--devices.drop_out=0.1"], ["--aggregation.kind=norm_bound"])):
        text = " ".join(written(tmp_path / str(number), *WIDE, *more)["not_covered"])
        assert ("virtual_seconds" in text) == (number == 0)
        assert ("bounded" in text) == (number == 1)
    public = (*WIDE, "--devices.drop_out=0.1", "--privacy.release=public")
    assert "virtual_seconds" not in " ".join(
        written(tmp_path / "public", *public, secret=True)["not_covered"]
    )


@pytest.mark.parametrize("clip_step", [0.2, 50.0, 1e4, 1e300])
def test_the_adaptive_bound_stays_in_its_range_however_large_its_step(clip_step: float) -> None:
    made = calibration(
        mechanism="adaptive", sampler="cyclic", clip_step=clip_step, indicator_std_fraction=5.0
    )
    mean = AdaptivePrivateMean(made, noise_seed=1)

    for number in range(20):
        context = CentralContext(
            current_central_iteration=number,
            do_evaluation=False,
            cohort_size=20,
            population=Population.TRAIN,
            algorithm_params=None,
            model_train_params=None,
            seed=0,
        )
        mean._adapt(context, 0.0)
        assert BOUND_RANGE[0] <= mean.clipping_bound <= BOUND_RANGE[1]


PRIVATE = (
    "--config=pfl-r-17",
    "--privacy.epsilon=9",
    "--privacy.delta=0.01",
    "--privacy.indicator_std_fraction=0.5",
)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ((*PRIVATE, "--privacy.noise_cohort_size=none"), True),
        ((*PRIVATE, "--privacy.noise_cohort_size=100000", "--privacy.noise_population=1000000"), False),
        (("--federated.weighting=users", "--local_privacy.epsilon=4"), True),
        (
            (*PRIVATE, "--privacy.noise_cohort_size=none", "--privacy.sampler=cyclic", "--privacy.band=2"),
            False,
        ),
    ],
    ids=["as executed", "a large system's noise", "local", "noise of rounds cancels"],
)
def test_noise_that_drowns_all_updates_is_warned_of(
    options: Sequence[str], warned: bool, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(*options, "--runtime.progress=true")
    found = re.search(  # on a line of its own, not behind the bar
        r"[\r\n]WARNING: the noise of a round is (\S+) times as long.* of all 3 rounds (\S+) times",
        capsys.readouterr().err,
    )
    assert bool(found) == warned
    if found:
        each = json.loads((directory / "privacy.json").read_text())["by_round"]
        std, bound = each["noise std. dev. on the mean"][0], each["clipping bound"][0]
        times = std * results(directory)["trainable_parameters"] ** 0.5 / bound
        assert [float(number) for number in found.groups()] == pytest.approx(
            [times, times / 3**0.5], rel=5e-3
        )
        assert each["signal-to-noise ratio"][0] <= 1.01 / times * max(1, each["users"][0] / 4)
