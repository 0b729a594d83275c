"""Each campaign in a short form; the long ones and their figures stand in README.md."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.core import ledger
from dataset.cli import run
from pfl_ext.engine.cpu.crops import Crops
from pfl_ext.models.small import NETWORKS
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.central import PrivateMean
from tests.benchmarks.sparing import sparingly
from tests.campaigns import audit_head, combinations, kill_training, neighbours
from tests.campaigns.drawn_options import drawn
from tests.campaigns.fuzz import Tally
from tests.campaigns.fuzz import campaign as fuzz
from tests.campaigns.kinds import COMMON, KINDS, subject_of
from tests.launching import environment, warmly
from tests.pfl_ext.engine.cpu.roundings import compiled
from tests.pfl_ext.tiny_detector import Tiny


def campaign(name: str, *argv: str) -> str:
    """What a campaign says; it must end well."""
    command = warmly(f"tests.campaigns.{name}", *argv)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


SMALL = {
    "pfl": ("--model.arch=lenet",),
    "ditto": ("--model.arch=lenet",),
    "detection": ("--model.arch=tiny", "--model.groups=2"),
}
"""Networks of a few thousand parameters; where lives end does not depend on how long they take."""


@pytest.mark.parametrize(
    "kind, kills, rounds",
    [("pfl", 3, 6), ("ditto", 2, 4), ("detection", 1, 2)],
    ids=["pfl", "ditto", "detection"],
)
def test_killed_runs_equal_the_run_never_killed(
    kind: str,
    kills: int,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lives are forks of this process, which has imported what they need."""
    NETWORKS.names()
    monkeypatch.setitem(NETWORKS._things, "tiny", Tiny())
    monkeypatch.setitem(KINDS, kind, (*KINDS[kind], *SMALL[kind]))
    monkeypatch.setattr(PrivacyConfig, "calibrate", PrivacyConfig.calibrate)  # `main` remembers its answers
    words = ["kill_training", f"--kills={kills}", f"--rounds={rounds}", f"--kind={kind}"]
    monkeypatch.setattr("sys.argv", words)
    with sparingly():
        kill_training.main()
    said = capsys.readouterr().out
    assert said.startswith(f"{kind}: {kills} kills over ")
    assert "each equal to the run never killed" in said
    (phases,) = re.findall("at work on: (.*)", said)
    assert sum(int(phase.rpartition(" ")[2]) for phase in phases.split(", ")) == kills


@pytest.mark.parametrize("kind", KINDS)
def test_the_words_of_each_kind_are_a_run(kind: str) -> None:
    subject_of(kind).benchmark.parse([*COMMON, *KINDS[kind]])


def test_killed_runs_of_two_workers_equal_the_run_never_killed() -> None:
    said = campaign("kill_workers", "--kills=1", "--rounds=4", "--kind=fl")
    assert said.startswith("fl, 2 workers: 1 kills over ")
    assert "each equal to the run never killed" in said


@compiled
def test_options_are_judged_by_both_engines_and_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine then frames crops itself where it must not, as it did once: their colors stay."""
    jitter = ("--federated.num_rounds=2", "--augment.color_jitter=0.4")
    with sparingly():
        campaign = combinations.Campaign(tmp_path)
        assert campaign.judge("flair", ("--federated.algorithm=fedgkt",))[0] == "refused"
        assert campaign.judge("classes", jitter)[0] == "fine"
        monkeypatch.setattr(Crops, "know", lambda model: True)
        verdict, what = campaign.judge("classes", jitter)
    assert (verdict, what.partition(":")[0]) == ("finding", "apart, of the way")


def test_what_one_user_moves_is_seen_in_sums_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        *("--federated.weighting=users", "--federated.num_rounds=1", "--privacy.noise_cohort_size=none"),
        *("--privacy.epsilon=50", "--privacy.delta=0.01", "--privacy.clipping_bound=0.001"),
    )
    real = PrivateMean.user_scales

    def too_large(self: PrivateMean, *words: Any) -> Any:
        scales, tally = real(self, *words)
        return scales * 1.001, tally

    with sparingly():
        campaign = neighbours.Neighbours(tmp_path)
        verdict, what = campaign.judge("classes", words)
        assert (verdict, what.rpartition("; ")[2]) == ("fine", "same files")
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "PUBLIC_LINE", (*ledger.PUBLIC_LINE, "train_loss"))
            assert campaign.judge("classes", words) == ("finding", "not the same: ['metrics.jsonl']")
        monkeypatch.setattr(PrivateMean, "user_scales", too_large)
        verdict, what = campaign.judge("classes", words)
    assert verdict == "finding"
    assert " moves the sum by 1.00" in what


def test_each_draw_of_options_is_a_config() -> None:
    asked: list[Sequence[str]] = []

    def refusal(subject: str, words: Sequence[str]) -> str | None:
        asked.append(words)
        return None if len(asked) % 2 else "refused"

    subject, words = drawn(0, 1, "flair", refusal)
    assert subject == "flair"
    assert (*words,) in asked[::2], "the last that was not refused"
    assert drawn(0, 1, "flair", lambda *_: "refused")[1] != words


def test_killed_preprocessing_makes_the_same_file() -> None:
    said = campaign("kill_preprocessing", "--kills=6", "--images=150", "--kind=archives")
    assert said.startswith("archives: 6 kills over ")
    assert "each with the content of the file made in one go" in said


def test_damaged_inputs_are_refused_in_one_line_or_read_rightly() -> None:
    """Three to each reader; another seed than the long campaign's."""
    tally = Tally(seed=1)
    fuzz(tally, 90)
    assert tally.findings == []
    assert len(tally.counts) >= 30
    assert {count.total() for count in tally.counts.values()} == {3}
    assert tally.peak < 2 << 30


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--data_path=nowhere.hdf5"], "error: --data_path nowhere.hdf5 cannot be read: "),
        (["--data_path=x", "--claims", "nan"], "error: --claims: give numbers above 0"),
        (
            ["--data_path=x", "--defect=nope"],
            "error: --defect: no name has the words 'nope'; choose from none; ",
        ),
    ],
)
def test_a_bad_call_of_the_audit_of_a_head_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(audit_head.main, argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1
