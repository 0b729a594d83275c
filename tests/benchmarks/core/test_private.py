"""Private runs of the training command: what they promise, keep secret and refuse."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from dp_accounting.pld import PLDAccountant

from benchmarks.core import recorder
from benchmarks.core.config.trees import Tree
from benchmarks.core.ledger import CentralLedger
from benchmarks.core.privacy_statement import ProtectedUnit
from benchmarks.core.secret import public_secret
from benchmarks.flair.config import parse
from pfl_ext.privacy.banded import BandedFactor
from pfl_ext.privacy.epsilon import _composed, epsilon_spent
from pfl_ext.privacy.local import LocalPrivacyConfig
from pfl_ext.randomness import stream
from tests.benchmarks.conftest import Refused, Train
from tests.benchmarks.core import worker_runs
from tests.benchmarks.run_files import lines, results

pytestmark = pytest.mark.xdist_group("private runs")
"""One process runs them all: runs that they share are made once, and calibrations are remembered."""

PRIVATE = worker_runs.PRIVATE


def privacy(directory: Path) -> Tree:
    return dict(json.loads((directory / "privacy.json").read_text()))


def test_the_paper_setting_is_calibrated_to_its_known_noise() -> None:
    """Sigma 17.33 by PLD for N = 41,131, T = 5,000, noise cohort 5,000."""
    config = parse(["--config=pfl-r-17"]).config
    assert config.privacy is not None
    made = config.privacy.calibrate(41_131, config.federated.cohort_size, config.federated.num_rounds)
    assert made.simulated.noise_multiplier == pytest.approx(17.33, abs=0.01)
    assert made.epsilon <= 2
    assert made.simulated.delta == pytest.approx(8.4026e-6, rel=1e-4)


def test_a_private_run_says_what_it_promises(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    directory = train(*PRIVATE, draw=True)
    statement = privacy(directory)
    assert statement["unit"] == "one user with all of their images"
    assert (statement["num_rounds"], statement["rounds_done"], statement["delta"]) == (3, 3, 0.01)
    simulated = statement["simulated_system"]
    assert statement["as_executed"]["population"] == simulated["population"] == 12
    assert simulated["epsilon_spent"] == simulated["epsilon_at_end"] <= 50
    assert statement["is_simulation"]
    assert statement["as_executed"]["cohort_size"] == 4
    bounds = statement["by_round"]["clipping bound"]
    assert bounds[0] == 0.1
    assert len(set(bounds)) == 3
    assert len(statement["by_round"]["signal-to-noise ratio"]) == 3
    assert [line["privacy"]["clipping bound"] for line in lines(directory)[:3]] == bounds
    spent = [line["simulated_epsilon"] for line in lines(directory)]
    assert spent == sorted(set(spent))
    assert (spent[0], spent[-1]) == (0, simulated["epsilon_spent"])
    assert [line.get("epsilon") for line in lines(directory)] == [0, None, None, None], "it is infinite"
    assert (directory / "plots" / "privacy.png").read_bytes().startswith(b"\x89PNG")
    summary = capsys.readouterr().err
    assert "privacy: epsilon" in summary
    assert f"by RDP, a looser check, {simulated['epsilon_at_end_rdp']:.3f}" in summary
    assert "SIMULATED with cohorts of 4 for 10" in summary
    assert "to none for a guarantee of this run" in summary
    assert "\nWARNING: delta is 0.01, which is large" in summary
    assert statement["as_executed"]["epsilon_at_end"] == statement["as_executed"]["mu_gdp"] == "infinite"
    assert "research only" not in summary


@pytest.mark.parametrize("name", ["pfl-r-17", "pfl-f-17", "pfl-r-1628", "pfl-f-1628"])
def test_every_private_row_of_table_1_runs(name: str, train: Train, tmp_path: Path) -> None:
    pretrained: list[str] = []
    if "-f-" in name:
        arch = "squeezenet1_1"  # with a ninth of ResNet18's parameters
        pretrained = [f"--model.arch={arch}", f"--weights={tmp_path / 'imagenet.pth'}"]
        network = torchvision.models.get_model(arch, weights=None)
        torch.save(network.state_dict(), tmp_path / "imagenet.pth")
    directory = train(*PRIVATE, f"--config={name}", *pretrained, "--federated.num_rounds=1")
    statement = privacy(directory)
    assert (statement["sampler"], statement["config"]["mechanism"], statement["rounds_done"]) == (
        "poisson",
        "adaptive",
        1,
    )
    assert statement["by_round"]["refused updates"] == [0]
    assert results(directory)["setting"] == name.upper()


CYCLIC = (*PRIVATE, "--privacy.sampler=cyclic", "--privacy.noise_cohort_size=4")


def test_banded_noise_with_a_circle_of_users_is_a_choice_of_the_config(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(*CYCLIC, "--privacy.band=3")
    statement = privacy(directory)
    assert (statement["sampler"], statement["config"]["band"]) == ("cyclic", 3)
    assert statement["neighbouring_relation"] == "replace_special"
    assert statement["as_executed"]["participations_at_most"] == 1
    assert statement["as_executed"]["min_separation"] == 3
    assert statement["by_round"]["users"] == [4, 4, 4]
    noise, bound = (statement["by_round"][name] for name in ("noise std. dev. on the mean", "clipping bound"))
    scales = [n / b for n, b in zip(noise, bound)]
    assert [s / scales[0] for s in scales] == pytest.approx(
        [s / BandedFactor(3, 3).noise_scales[0] for s in BandedFactor(3, 3).noise_scales]
    )
    assert "(cyclic sampling, pld, band 3)" in capsys.readouterr().err


def test_noise_and_cohorts_are_secret_unless_a_seed_is_asked_for(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = train(*PRIVATE, name="first"), train(*PRIVATE, name="second")
    assert results(first)["model_sha256"] != results(second)["model_sha256"]
    assert not list(first.rglob("noise_seed"))
    cohorts = [[line["images"] for line in lines(directory)[:3]] for directory in (first, second)]
    assert cohorts[0] != cohorts[1]
    again = [train(*PRIVATE, "--seed=0", name=name) for name in ("third", "fourth")]
    assert results(again[0])["model_sha256"] == results(again[1])["model_sha256"]
    assert privacy(again[0])["seeded_for_research_only"]
    assert "for research only" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [[], ["--seed=0"]], ids=["entropy", "seeded"])
def test_a_resumed_private_run_goes_on_with_the_same_noise_bound_and_budget(
    seed: list[str], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predecessors 10 and 11: noise replayed or lost, the clipping bound starting over."""
    argv = (*PRIVATE, *seed, "--runtime.checkpoint_every=2", "--federated.num_rounds=4")
    real = recorder.Recorder.step_done
    seen: list[Tree] = []

    def watch(self: Any, step: int, values: Any, model: Any) -> None:
        real(self, step, values, model)
        seen.append({"round": step, **values})
        if step == 2 and len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(recorder.Recorder, "step_done", watch)
    directory = train(*argv, code=130)
    assert privacy(directory)["rounds_done"] == 3, "the third is in metrics.jsonl, though in no checkpoint"
    if not seed:
        assert (directory / "checkpoint" / "noise_seed").stat().st_mode & 0o777 == 0o600
    train(*argv)
    assert [line["round"] for line in seen] == [0, 1, 2, 2, 3]
    assert seen[2] == seen[3]
    assert privacy(directory)["rounds_done"] == 4
    if seed:
        assert results(train(*argv, name="whole"))["model_sha256"] == results(directory)["model_sha256"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--privacy.noise_cohort_size=13"], "only 12 users"),
        (["--privacy.noise_cohort_size=3"], "must be at least the cohort_size, 4"),
        (["--privacy.epsilon=0"], "privacy.epsilon is '0': input should be greater than 0"),
        (["--federated.weighting=images"], "set federated.weighting to users"),
        (["--federated.replacement=true"], "refuses federated.replacement = true"),
        (["--mode=centralised"], "privacy refuses mode = centralised"),
        (["--privacy.delta=0.5"], "not below one in 12 users"),
        (["--privacy.band=2"], "set privacy.sampler to cyclic"),
        (["--privacy.sampler=cyclic", "--privacy.band=2"], "set it to at most 1"),
        (["--privacy.indicator_std_fraction=0.001"], "privacy.indicator_std_fraction is 0.001"),
        (["--privacy.noise_cohort_size=none", "--privacy.delta=1e-16"], "set privacy.accountant to rdp"),
        (["--privacy.epsilonn=1"], "did you mean privacy.epsilon?"),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, list) else "",
)
def test_a_private_mistake_ends_in_one_line_and_code_2(
    argv: list[str], message: str, refused: Refused
) -> None:
    refused(message, *PRIVATE, *argv)


LOCAL = ("--federated.weighting=users", "--local_privacy.epsilon=4", "--local_privacy.delta=0.001")


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_local_privacy_is_a_choice_of_the_config_and_adds_up_over_a_users_rounds(
    mechanism: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = mechanism == "gaussian"
    directory = train(*LOCAL, f"--local_privacy.mechanism={mechanism}", "--seed=1", draw=drawn)
    statement = privacy(directory)
    made = LocalPrivacyConfig(mechanism, epsilon=4, delta=0.001)  # type: ignore[arg-type]
    assert (statement["kind"], statement["rounds_done"], statement["epsilon_of_one_participation"]) == (
        "local",
        3,
        4,
    )
    seen = Counter(
        user for r in range(3) for user in stream(1, "cohort", r).choice(12, 4, replace=False).tolist()
    )
    most = max(seen.values())
    assert statement["participations_at_most"] == {"so_far": most, "at_end": most}
    assert statement["epsilon_spent"] == statement["epsilon_at_end"] == made.epsilon_after(most, 0.001)
    spent = [line["epsilon"] for line in lines(directory)]
    assert spent == sorted(spent)
    assert (spent[:2], spent[-1]) == ([0, made.epsilon_after(1, 0.001)], statement["epsilon_spent"])
    assert statement["seeded_for_research_only"]
    assert len(statement["by_round"]["signal-to-noise ratio"]) == 3
    assert statement["by_round"]["users"] == [4, 4, 4]
    if drawn:
        assert (directory / "plots" / "privacy.png").read_bytes().startswith(b"\x89PNG")
    screen = capsys.readouterr()
    assert f"privacy: LOCAL, {mechanism}, epsilon 4 of each update" in screen.err
    assert ("WARNING: delta is 0.001, which is large" in screen.err) == (mechanism == "gaussian")
    assert ("warning" in statement) == (mechanism == "gaussian")
    assert "FLAIR paper" not in screen.out, "the paper has no such row"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--privacy.epsilon=2"], "privacy and local_privacy are both set"),
        (["--mode=centralised"], "local_privacy refuses mode = centralised"),
        (["--federated.weighting=images"], "set federated.weighting to users"),
        (["--federated.replacement=true"], "local_privacy refuses federated.replacement = true"),
        (["--federated.algorithm=scaffold"], "local_privacy refuses federated.algorithm = scaffold"),
        (["--local_privacy.epsilon=-1"], "local_privacy.epsilon is '-1'"),
        (
            ["--local_privacy.epsilon=1e8"],
            "local_privacy.epsilon is '1e8': input should be less than or equal to 100000",
        ),
        (["--local_privacy.delta=0.09"], "local_privacy.delta is 0.09, but must be below 1 / 12, one"),
        (["--local_privacy.mechanism=rappor"], "local_privacy.mechanism is 'rappor'"),
        (["--local_privacy.sigma=1"], "there is no config key local_privacy.sigma"),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, list) else "",
)
def test_a_mistake_about_local_privacy_ends_in_one_line_and_code_2(
    argv: list[str], message: str, refused: Refused
) -> None:
    refused(message, *LOCAL, *argv)


def test_epsilon_is_accounted_at_few_points_of_a_run_and_never_too_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint after every round asks dp-accounting, here on a wide grid, 20 times a system at most."""
    sizes = ("--federated.num_rounds=60", "--federated.cohort_size=50", "--privacy.noise_cohort_size=100")
    config = parse(["--config=pfl-r-17", "--seed=1", *sizes]).config
    ledger = CentralLedger(config, 2000, ProtectedUnit(), public_secret(tmp_path, 1), tmp_path)
    asked = []

    def counted(*args: Any, value_discretization_interval: float) -> Any:
        asked.append(args)
        return PLDAccountant(*args, value_discretization_interval=50 * value_discretization_interval)

    monkeypatch.setattr("pfl_ext.privacy.epsilon.PLDAccountant", counted)
    for cached in (epsilon_spent, _composed):
        cached.cache_clear()
    exact = {t: ledger.calibration.epsilon_after(t) for t in (1, 3, 4, 41, 60)}
    assert len(asked) == len(exact)
    epsilon_spent.cache_clear()
    asked.clear()
    for t in range(1, 61):
        ledger.write(t, [])
        statement = privacy(tmp_path)
        assert statement["rounds_done"] == t <= statement["epsilon_spent_counts_rounds"] < t + 3
        assert statement["simulated_system"]["epsilon_spent"] >= exact.get(t, 0)
        line = {"simulated_epsilon": "simulated_system", "epsilon": "as_executed"}
        assert ledger.epsilons(t) == {key: statement[name]["epsilon_spent"] for key, name in line.items()}
    assert len(asked) <= 2 * 20
    assert statement["simulated_system"]["epsilon_spent"] == exact[60]


def test_the_privacy_of_a_run_cannot_be_changed_on_resuming(train: Train, refused: Refused) -> None:
    train(*PRIVATE)
    refused("privacy.epsilon: 50.0 -> 60.0", *PRIVATE, "--privacy.epsilon=60")


REAL = (*PRIVATE, "--privacy.noise_cohort_size=none")
FORBIDDEN_IN_PUBLIC = ("users", "images", "seconds", "max_local_steps", "worker_seconds", "train_loss")
"""What a line of metrics.jsonl tells of the training images."""


def keys_of(tree: Any) -> set[str]:
    """All keys of a JSON tree."""
    if isinstance(tree, dict):
        return set(tree) | {key for value in tree.values() for key in keys_of(value)}
    return {key for value in tree for key in keys_of(value)} if isinstance(tree, list) else set()


def test_a_public_run_writes_nothing_that_depends_on_the_training_images(train: Train) -> None:
    """No exact figure of the training users is left in any file but the checkpoint."""
    words = (*REAL, "--privacy.release=public", "--evaluation.average=ema")
    directory = train(*words)
    public = {"round", "learning_rate", "val", "privacy", "epsilon"}
    assert all(set(line) <= public for line in lines(directory))
    statement, ended = privacy(directory), results(directory)
    assert lines(directory)[-1]["epsilon"] == statement["as_executed"]["epsilon_spent"] > 0
    private = {"clipping bound", "noise std. dev. on the mean", "noisy fraction unclipped"}
    assert set(statement["by_round"]) == private
    assert set(lines(directory)[0]["privacy"]) == private
    secret = {"data", "data_sha256", "wall_clock_s", "shots", *FORBIDDEN_IN_PUBLIC}
    assert not secret & keys_of(ended)
    assert {"test", "val", "unaveraged", "per_class_ap", "model_sha256"} <= set(ended)
    assert not any("realised cohort" in text for text in statement["not_covered"])
    train(*words)  # a finished run is shown again


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--seed=1"], "privacy.release public needs secret noise"),
        (["--privacy.noise_cohort_size=10"], "privacy.release public needs a guarantee of this run, but"),
    ],
)
def test_a_public_release_is_of_a_run_with_a_guarantee(
    argv: list[str], message: str, refused: Refused
) -> None:
    refused(message, *REAL, "--privacy.release=public", *argv)


def test_a_real_run_names_no_simulated_system_and_has_exact_figures(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(*REAL)
    statement, output = privacy(directory), capsys.readouterr()
    exact = keys_of(results(directory)) | keys_of(lines(directory))
    assert {"data", "shots", "images", "wall_clock_s"} <= exact
    assert any("realised cohort" in text for text in statement["not_covered"])
    assert "simulated_system" not in statement
    assert not statement["is_simulation"]
    assert "SIMULATED" not in output.err
    executed = statement["as_executed"]
    assert executed["epsilon_spent"] == executed["epsilon_at_end"] <= 50
    asked = parse([*REAL]).config.privacy
    assert asked is not None
    made = asked.calibrate(12, 4, 3)
    assert [line["epsilon"] for line in lines(directory)] == [made.epsilon_after(r) for r in range(4)]
    assert lines(directory)[-1]["epsilon"] == executed["epsilon_spent"]
    assert not any("simulated_epsilon" in line for line in lines(directory))
    assert executed["epsilon_at_end"] <= executed["epsilon_at_end_rdp"]
    assert executed["mu_gdp"] > 0
    assert 0 < executed["delta_at_epsilon"]["8"] < executed["delta_at_epsilon"]["4"] <= 1
    assert statement["paragraph"] in " ".join(output.out.split())
    assert statement["paragraph"].startswith("Training was differentially private with epsilon = ")
    for words in ("delta = 0.01", "one user is added or removed", "12 users", "3 rounds", "dp-accounting"):
        assert words in statement["paragraph"]
    assert any("five like this one compose to epsilon = " in text for text in statement["not_covered"])


@pytest.mark.parametrize("kind", ["privacy", "local_privacy"])
def test_the_word_user_is_not_said_of_clients_that_were_dealt_their_images(
    kind: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(*(REAL if kind == "privacy" else LOCAL), "--data.partition=iid")
    statement = privacy(directory)
    said = [statement["paragraph"], statement["unit"], statement["neighbouring_relation"], statement["claim"]]
    summary = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("privacy:"))
    assert all("user" not in text for text in (*said, summary, *statement["not_covered"]))
    assert "one client of the partition iid" in statement["unit"]


def test_the_scale_for_own_data_simulates_nothing() -> None:
    """The clothing photos: 275 users, cohorts of 20, 150 rounds."""
    config = parse(["--config=pfl-r-17", "--scale=small"]).config
    assert config.privacy is not None
    made = config.privacy.calibrate(275, config.federated.cohort_size, config.federated.num_rounds)
    assert not made.is_simulation
    assert made.epsilon_executed <= 2
    assert made.value_noise_multiplier < 1.1 * made.simulated.noise_multiplier


def test_a_local_run_that_is_stopped_early_has_stated_what_was_spent(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint, and by the rounds that were made, not by all that were planned."""
    real = recorder.Recorder.step_done

    def die(self: Any, step: int, *rest: Any) -> None:
        real(self, step, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(recorder.Recorder, "step_done", die)
        directory = train(*LOCAL, "--federated.num_rounds=30", "--runtime.checkpoint_every=30", code=130)
    statement = privacy(directory)
    assert statement["rounds_done"] == 1
    assert statement["participations_at_most"]["so_far"] <= statement["epsilon_spent_counts_rounds"] < 30
    assert statement["participations_at_most"]["so_far"] < statement["participations_at_most"]["at_end"]
    assert statement["epsilon_spent"] < statement["epsilon_at_end"]
