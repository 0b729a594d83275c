"""The side-by-side measurement: equal work, times that add up, a picture; and bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bench import cpu_kernels, engine_parts
from benchmarks.bench.rounds import Clock
from benchmarks.core.features import inputs_of
from benchmarks.fedcv import bench as fedcv
from benchmarks.flair import bench
from benchmarks.visual_classification import bench as vision
from dataset.cli import run as run_command
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.cpu.build import Unavailable
from pfl_ext.engine.cpu.check import checked
from pfl_ext.engine.training import LocalTraining
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.multi_label import MultiLabel
from tests.benchmarks.fedcv.test_segmentation import Tiny as TinySegmenter
from tests.card import card
from tests.pfl_ext.engine.setting import small_backbone
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore
from tests.pfl_ext.tiny_detector import Tiny

TINY = bench.Case("tiny", 32, cohort=2, users=6, val_users=2, network="--model.arch lenet")


def test_a_case_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SETS, "cpu", [TINY])
    output = tmp_path / "out" / "bench.json"
    words = ["--cases", "cpu", "--rounds", "1", "--data_dir", str(tmp_path), "--output", str(output)]
    assert run_command(bench.main, words) == 0
    (result,) = json.loads(output.read_text())["results"]
    for name in ("stock", "fast"):
        side = result[name]
        assert sum(side["share"].values()) == pytest.approx(1, abs=0.02)
        assert min(side["share"].values()) >= 0
        assert side["share"]["training"] > 0
        assert side["share"]["evaluation"] > 0
        assert side["users_per_s"] == pytest.approx(2 / side["round_s"])
    assert result["ratio"] == pytest.approx(result["stock"]["round_s"] / result["fast"]["round_s"])
    assert result["deviation_of_the_models_first_move"] < 0.5, "both train the same users"
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "case",
    [
        fedcv.Case("tiny", "tiny_masks", 16, 2, 2, words=("--model.pretrained=false",)),
        fedcv.Case(
            "tiny", "tiny_fasterrcnn", 16, 2, 2, True, words=("--model.pretrained=false", "--model.groups=2")
        ),
    ],
    ids=["masks", "boxes"],
)
def test_masks_and_boxes_are_measured_among_the_other_cases(
    case: fedcv.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NETWORKS.names()
    monkeypatch.setitem(NETWORKS._things, "tiny_fasterrcnn", Tiny("fasterrcnn"))
    monkeypatch.setitem(NETWORKS._things, "tiny_masks", TinySegmenter())
    assert {one for one in fedcv.CPU if one.pixels == 224} <= {*bench.SETS["cpu"]}
    monkeypatch.setitem(bench.SETS, "cpu", [case])
    output = tmp_path / "bench.json"
    assert run_command(bench.main, ["--cases", "cpu", "--rounds", "1", "--output", str(output)]) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert result["image_passes_a_round"] == 4
    assert result["deviation_of_the_models_first_move"] < 1e-3, "both train the same users"


def test_a_private_round_is_measured_beside_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.SETS, "cpu", [replace(TINY, private=True, val_users=0)])
    output = tmp_path / "bench.json"
    words = ["--cases", "cpu", "--rounds", "1", "--data_dir", str(tmp_path), "--output", str(output)]
    assert run_command(bench.main, words) == 0
    (result,) = json.loads(output.read_text())["results"]
    cost = result["private_over_plain"]
    assert len(cost["plain"]) == len(cost["private"]) == 1
    assert cost["ratio"] == pytest.approx(cost["private"][0] / cost["plain"][0])
    assert f"tiny: {cost['ratio']:.2f} times a plain round" in capsys.readouterr().out


def test_a_head_is_measured_on_features_beside_pfls_loop_on_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.SETS, "cpu", [replace(TINY, network=bench.HEAD, val_users=0)])
    read: dict[str, tuple[int, ...]] = {}

    def watched(*given: Any) -> Any:
        inputs = inputs_of(*given)
        engine = given[0].run.runtime.engine
        read[engine] = inputs.split("train").read(np.arange(2))[0].shape
        return inputs

    monkeypatch.setattr("benchmarks.flair.bench.inputs_of", watched)
    output = tmp_path / "bench.json"
    words = ["--cases", "cpu", "--rounds", "1", "--data_dir", str(tmp_path), "--output", str(output)]
    assert run_command(bench.main, words) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert read == {"stock": (2, 32, 32, 3), "fast": (2, 1280)}
    assert result["deviation_of_the_models_first_move"] < 0.01


def test_the_training_of_lanes_made_later_is_charged_too() -> None:
    engine, clock = CohortEngine(ImageClassifier(small_backbone(), task=MultiLabel(), input_size=10)), Clock()
    how = LocalTraining(0.1, 1, 4, "none", 0.0, 0.0, None, weight_decay=0.1)
    engine.watch = clock
    first = engine.lanes[0]
    store = NumberedStore([2, 3], side=12)
    users = FederatedImageDataset(store, local_sampling(num_epochs=1, batch_size=4, input_size=10), seed=0)
    engine.train(users, engine.tasks(users.members(2), how), how, lambda member: 1.0, None)
    assert engine.lanes[0] is not first, "weight decay needs another network"
    assert clock.seconds["training"] > 0
    assert clock.seconds["data"] > 0
    engine.close()


def test_a_card_is_measured_by_default_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        bench.SETS, "gpu", [replace(TINY, runtime=("--runtime.lanes=1", "--runtime.fuse=true"))]
    )
    output = tmp_path / "bench.json"
    with card():
        words = ["--rounds", "1", "--data_dir", str(tmp_path), "--output", str(output)]
        assert run_command(bench.main, words) == 0
    (result,) = json.loads(output.read_text())["results"]
    fast = result["fast"]
    passes = fast["image_passes_per_s"]
    assert fast["model_flop_utilisation"] == pytest.approx(passes * bench.RESNET18_FLOPS * 32**2 / 989e12)
    assert (result["peak_memory_gb"], result["reserved_memory_gb"]) == (1, 2)
    assert result["stock"]["peak_memory_gb"] == result["fast"]["peak_memory_gb"] == 1
    assert result["deviation_of_the_models_first_move"] < 0.5


def test_single_label_users_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--data.image_size=16", "--model.input_size=16", "--local.batch_size=4")
    tiny = vision.Case("tiny", words, users=6, user_images=10, cohort=2, scored=True)
    monkeypatch.setitem(vision.SETS, "cpu", [tiny])
    output = tmp_path / "bench.json"
    assert run_command(vision.main, ["--cases=cpu", "--rounds=2", f"--output={output}"]) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert (result["image_passes_a_round"], result["steps_a_round"]) == (20, 6)
    assert result["fast"]["share"]["evaluation"] > 0
    assert result["deviation_of_the_models_first_move"] < 1e-4


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--only", "no such case"]])
def test_bad_input_ends_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(bench.main, words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words[0] in error
    assert error.count("\n") == 1


def test_the_compiled_layers_are_measured_beside_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    measure = ["--pixels", "32", "--images", "1", "--repeats", "1"]
    try:
        checked()
    except Unavailable:
        with pytest.raises(ValueError, match="there is nothing to measure: "):
            cpu_kernels.main(measure)
        return
    cpu_kernels.main(measure)
    steps, rows = capsys.readouterr().out.split("\n\n")[1:]
    assert steps.splitlines()[2].startswith("| 32, 1 | ")
    layers = [row.split(" | ") for row in rows.strip().splitlines()[2:]]
    assert sum(int(row[2]) for row in layers) == 19, "every convolution but the first, which is torch's"
    numbers = [number for row in layers for cell in row[4:] for number in cell.strip(" |").split(" + ")]
    assert len(numbers) in (4 * len(layers), 6 * len(layers))
    assert all(float(number) > 0 for number in numbers)
    with pytest.raises(ValueError, match="at least 32"):
        cpu_kernels.main(["--pixels", "16"])


def test_each_part_of_the_engine_is_left_out_in_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_parts, "NETWORKS", ())
    engine_parts.main(["--pixels", "32", "--users", "1", "--repeats", "1"])
    row = capsys.readouterr().out.strip().splitlines()[-1].strip("| ").split(" | ")
    assert row[0] == "resnet18, 32"
    assert len(row) == 1 + len(engine_parts.PARTS)
    assert all(float(cell.split()[0]) > 0 for cell in row[1:])
    with pytest.raises(ValueError, match="at least 32"):
        engine_parts.main(["--pixels", "16"])
