"""The secret of a private run: no round is ever released with two different noises."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import pytest

from benchmarks.core import execute
from benchmarks.core.ledger import CentralLedger
from benchmarks.core.privacy_statement import ProtectedUnit
from benchmarks.core.recorder import Recorder
from benchmarks.core.secret import has_rounds, open_secret, public_secret, secret_path
from benchmarks.flair.config import parse
from dataset.store.hdf5 import DataFile
from pfl_ext.privacy.central import NoisyMean
from tests.benchmarks.conftest import Train, train_into
from tests.benchmarks.core.test_private import PRIVATE
from tests.benchmarks.run_files import lines, results
from tests.dataset.drawn import records, write_predecessor

pytestmark = pytest.mark.xdist_group("private runs")
"""One process runs them all: runs that they share are made once, and calibrations are remembered."""

SHORT = (*PRIVATE, "--runtime.checkpoint_every=2", "--federated.num_rounds=3")


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What stands last on the screen."""
    return capsys.readouterr().err.rstrip().splitlines()[-1]


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Round and SHA-256 of each noisy mean that the server makes from now on."""
    seen: list[tuple[int, str]] = []
    real = NoisyMean.postprocess_server

    def watched(self: NoisyMean, **given: Any) -> Any:
        stats, metrics = real(self, **given)
        content = b"".join(stats[name].detach().numpy().tobytes() for name in sorted(stats))
        seen.append((given["central_context"].current_central_iteration, hashlib.sha256(content).hexdigest()))
        return stats, metrics

    monkeypatch.setattr(NoisyMean, "postprocess_server", watched)
    return seen


@pytest.fixture(scope="module")
def killed_once(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run whose last round was made, and which stopped before ``results.json``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "_write_results", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        return train_into(tmp_path_factory.mktemp("runs") / "killed", mini_file, *SHORT, code=130)


@pytest.fixture
def killed(killed_once: Path, tmp_path: Path) -> Path:
    """The directory of `train`, with a copy of the killed run."""
    return Path(shutil.copytree(killed_once, tmp_path / "run"))


def test_a_run_stopped_before_its_results_releases_no_round_again(
    killed: Path, train: Train, released: list[tuple[int, str]]
) -> None:
    history = lines(killed)
    assert secret_path(killed).exists()
    assert train(*SHORT) == killed
    assert released == []
    assert lines(killed) == history
    assert results(killed)["rounds"] == 3
    assert not secret_path(killed).exists()


def test_rounds_after_the_last_checkpoint_are_released_again_with_the_same_noise(
    train: Train, monkeypatch: pytest.MonkeyPatch, released: list[tuple[int, str]]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "end", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train(*SHORT, code=130)
    train(*SHORT)
    assert [number for number, _ in released] == [0, 1, 2, 2]
    assert len(set(released)) == 3


def test_rounds_without_their_secret_are_refused(
    killed: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    secret_path(killed).unlink()
    train(*SHORT, code=2)
    assert "noise_seed is missing" in last_line(capsys)
    for checkpoint in (killed / "checkpoint").glob("*.safetensors"):
        checkpoint.unlink()
    train(*SHORT, code=2)  # lines of metrics.jsonl are rounds as well
    assert "noise_seed is missing" in last_line(capsys)


@pytest.mark.parametrize("content, holds", [(None, False), ("", False), ("{", True), ("{}\n", True)])
def test_half_a_line_is_a_round(tmp_path: Path, content: str | None, holds: bool) -> None:
    """A kill in the middle of a line leaves a round that was made."""
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert has_rounds(tmp_path) == holds


def test_a_checkpoint_is_refused_beside_another_secret(
    killed: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    held = json.loads(secret_path(killed).read_text())
    secret_path(killed).write_text(json.dumps({**held, "secret": "12345"}))
    train(*SHORT, code=2)
    assert "does not belong to" in last_line(capsys)
    (killed / "privacy.json").unlink()  # the checkpoint knows as well
    train(*SHORT, code=2)
    assert "does not belong to the checkpoint beside it, so rounds would be" in last_line(capsys)
    secret_path(killed).write_text("12345")
    train(*SHORT, code=2)
    assert "damaged, or of an older version" in last_line(capsys)


@pytest.fixture(scope="module")
def killed_early_once(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run that stopped with two lines of ``metrics.jsonl``, before its first checkpoint."""
    real = Recorder.step_done

    def stopped(self: Recorder, step: int, *given: Any) -> None:
        real(self, step, *given)
        if step == 1:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "step_done", stopped)
        return train_into(tmp_path_factory.mktemp("runs") / "early", mini_file, *EARLY, code=130)


EARLY = (*PRIVATE, "--runtime.checkpoint_every=100", "--federated.num_rounds=40")


@pytest.fixture
def killed_early(killed_early_once: Path, tmp_path: Path) -> Path:
    """The directory of `train`, with a copy of the run that was killed early."""
    return Path(shutil.copytree(killed_early_once, tmp_path / "run"))


def test_what_was_spent_counts_every_line_that_was_written(killed_early: Path) -> None:
    statement = json.loads((killed_early / "privacy.json").read_text())
    assert len(lines(killed_early)) == 2
    assert statement["epsilon_spent_counts_rounds"] == 2, "a fortieth is accounted for in steps of two"
    assert statement["simulated_system"]["epsilon_spent"] > 0
    assert "paragraph" not in statement


def test_another_secret_is_refused_before_the_first_checkpoint_as_well(
    killed_early: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    held = json.loads(secret_path(killed_early).read_text())
    secret_path(killed_early).write_text(json.dumps({**held, "secret": "12345"}))
    train(*EARLY, code=2)
    assert "does not belong to" in last_line(capsys)
    secret_path(killed_early).unlink()
    (killed_early / "metrics.jsonl").unlink()
    train(*EARLY, code=2)  # privacy.json is there: rounds were released
    assert "noise_seed is missing" in last_line(capsys)


def test_rounds_are_not_made_again_in_another_precision_with_the_same_noise(
    killed_early: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The difference of two sums with one noise has no noise: of a round in float32 and in bfloat16."""
    before = secret_path(killed_early).read_bytes()
    train(*EARLY, "--runtime.precision=bf16", code=2)
    assert "set runtime.precision to fp32" in last_line(capsys)
    assert secret_path(killed_early).read_bytes() == before


def test_what_was_spent_is_not_taken_back_by_a_kill(tmp_path: Path) -> None:
    """Rounds that a kill undid were released, and stay counted while they are made again."""
    directory = tmp_path / "run"
    directory.mkdir()
    secret = open_secret(directory, "config", "data")
    config = parse([*EARLY, "--federated.cohort_size=4"]).config

    def ledger() -> CentralLedger:
        return CentralLedger(config, 12, ProtectedUnit(), secret, directory)

    ledger().write(9, [])
    ledger().write(4, [])
    statement = json.loads((directory / "privacy.json").read_text())
    assert (statement["rounds_done"], statement["epsilon_spent_counts_rounds"]) == (9, 10)


def test_a_secret_that_a_kill_left_beside_results_is_deleted(
    killed: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(*SHORT)
    secret_path(killed).write_text("{}")
    train(*SHORT)
    assert not secret_path(killed).exists()

    def unlink(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")  # which it is even if there is no such file

    monkeypatch.setattr(Path, "unlink", unlink)
    train(*SHORT)


def test_a_copied_secret_meets_no_other_data_and_no_other_config(tmp_path: Path) -> None:
    first = open_secret(tmp_path, "config", "data")
    assert open_secret(tmp_path, "config", "data") == first
    assert open_secret(tmp_path, "config", "other data").sha256 != first.sha256  # no round yet: a new one
    held = secret_path(tmp_path).read_bytes()
    assert secret_path(tmp_path).stat().st_mode & 0o777 == 0o600
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for keys in (("config", "data"), ("other", "other data")):
        with pytest.raises(ValueError, match="a secret must not be used twice"):
            open_secret(tmp_path, *keys)
    assert secret_path(tmp_path).read_bytes() == held


def test_the_noise_depends_on_secret_config_and_data(tmp_path: Path) -> None:
    def seeds(secret: str, *keys: str) -> tuple[int, int]:
        content = {"secret": secret, "config_sha256": keys[0], "data_sha256": keys[1]}
        secret_path(tmp_path).parent.mkdir(exist_ok=True)
        secret_path(tmp_path).write_text(json.dumps(content))
        opened = open_secret(tmp_path, *keys)
        return opened.noise_seed, opened.cohort_seed

    drawn = [seeds("1", "a", "b"), seeds("2", "a", "b"), seeds("1", "c", "b"), seeds("1", "a", "c")]
    assert len({seed for pair in drawn for seed in pair}) == 8
    assert seeds("1", "a", "b") == drawn[0]


def test_the_runs_seed_is_no_secret(tmp_path: Path) -> None:
    assert public_secret(tmp_path, 3).is_public
    assert public_secret(tmp_path, 3) == public_secret(tmp_path, 3)
    assert not secret_path(tmp_path).exists()


def test_no_noise_is_used_again_where_only_pixels_differ(
    tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere size and labels distinguish files of another make; noise needs every byte of them."""
    data = write_predecessor(tmp_path / "f.h5", records(), "pfl", True)
    argv = (*SHORT, "--privacy.noise_cohort_size=none", f"--data_path={data}")
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "end", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train(*argv, code=130)
    with DataFile(data) as before:
        known = before.fingerprint
    with h5py.File(data, "r+") as file:
        images = next(iter(file["train"].values()))["images"]
        images[...] = 255 - images[()]
    with DataFile(data) as after:
        assert after.fingerprint == known
    train(*argv, code=2)
    assert "on other data, and a secret must not be used twice" in last_line(capsys)
