"""Federated segmentation end to end on a tiny file: engines, privacy, a kill, pictures, what is refused."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compare.latex import latex, latex_users
from benchmarks.compare.reading import compare
from benchmarks.core.experiment import build_model
from benchmarks.fedcv.segmentation.config import SEGMENTATION, parse
from benchmarks.fedcv.segmentation.train import FederatedSegmentation, main
from benchmarks.flair.config import FLAIR
from benchmarks.predict.__main__ import main as predict
from dataset.cli import run
from dataset.flair.mini import draw_images, write_mini
from dataset.flair.mini_outlines import CLASSES, masked_index, write_masked
from dataset.partitions import of_file
from dataset.store.annotations import Masks
from dataset.store.hdf5 import DataFile
from dataset.store.mask_view import MaskView
from dataset.store.validate import validate
from pfl_ext.models.decoders import Decoder, EncoderDecoder
from pfl_ext.models.encoders import Encoder
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.multi_label import MultiLabel
from tests.benchmarks.compare.test_latex import rows_of
from tests.benchmarks.conftest import TINY, Refused, Train, killed_and_resumed
from tests.benchmarks.run_files import results, weights
from tests.benchmarks.sparing import run_into
from tests.dropped import lesions

SPEC = replace(
    TINY, image_size=16, train_users=8, val_users=3, test_users=3, coarse_labels=1, num_fine_labels=17
)
SMALL = (
    "--data.image_size=16",
    "--model.input_size=16",
    "--model.arch=tiny",
    "--model.normalisation=half",
    "--model.pretrained=false",
    "--local.batch_size=4",
    "--federated.num_rounds=2",
    "--federated.cohort_size=3",
    "--evaluation.every_rounds=1",
    "--evaluation.best_by=last",
    "--runtime.progress=false",
    "--runtime.checkpoint_every=1",
)
LITE = (
    "--model.arch=deeplabv3plus_efficientnet_lite0",
    "--model.normalisation=efficientnet_lite",
    "--model.pretrained=true",
)


@pytest.fixture(scope="module")
def masks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "masks.hdf5"
    write_masked(path, SPEC)
    return path


@pytest.fixture
def train(masks_file: Path, tmp_path: Path) -> Train:
    """Run the training command on the tiny data set; the run directory."""

    def call(*argv: str, name: str = "run", code: int = 0, draw: bool = False) -> Path:
        words = (f"--data_path={masks_file}", *SMALL, *argv)
        return run_into(main, tmp_path / name, *words, code=code, draw=draw)

    return call


class TinyEncoder(Encoder):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, images: Tensor) -> list[Tensor]:
        first = self.first(images)
        return [first, self.second(first)]


class TinyDecoder(Decoder):
    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(16, num_labels, 1)

    def forward(self, maps: Sequence[Tensor], images: Tensor) -> Tensor:
        wide = [F.interpolate(x, images.shape[2:]) for x in maps]
        return self.classifier(torch.cat(wide, 1))  # type: ignore[no-any-return]


class Tiny:
    """A network of 1,100 parameters, so that runs cost little more than their files."""

    encoder, outputs = "lenet", "pixels"

    def __call__(self, num_labels: int, input_size: int) -> EncoderDecoder:
        return EncoderDecoder(TinyEncoder(), TinyDecoder(num_labels))


def plain(num_labels: int, input_size: int) -> nn.Module:
    """A network of one's own, without an encoder that is known."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, num_labels, 1))


plain.outputs = "pixels"  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    NETWORKS.names()
    monkeypatch.setitem(NETWORKS._things, "tiny", Tiny())
    monkeypatch.setitem(NETWORKS._things, "plain", plain)


def test_a_run_leaves_scores_of_each_class_and_pictures(train: Train) -> None:
    directory = train(draw=True)
    found = results(directory)
    known = [value for value in found["per_class_iou"].values() if value is not None]
    assert list(found["per_class_iou"]) == list(CLASSES)
    assert found["test"]["mIoU"] == pytest.approx(np.mean(known))
    dice = {name: value for name, value in found["per_class_dice"].items() if value is not None}
    assert next(iter(CLASSES)) == "background"
    assert found["test"]["Dice"] == pytest.approx(np.mean([dice[name] for name in [*dice][1:]]))
    assert found["per_class_sensitivity"].keys() == found["per_class_specificity"].keys() == {*CLASSES}
    assert found["partition"]["users"] == 8
    for picture in ("masks", "per_class_iou", "per_class_dice", "per_user", "training_curve"):
        assert (directory / "plots" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


def test_the_score_that_chose_the_model_is_shown_and_tabulated(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train("--evaluation.best_by=Dice", "--runtime.progress=true")
    dice = results(directory)["test"]["Dice"]
    assert "val Dice " in capsys.readouterr().err
    comparison = compare([directory])
    assert comparison.headline == ("mIoU", "Dice")
    heads, row = rows_of(latex(comparison, "x"))
    cells = dict(zip(heads, row, strict=True))
    assert cells[r"Dice on test (\%)"] == f"{dice:.2f}"
    assert [head for head in heads if "users'" in head] == [r"worst decile, users' Dice, new (\%)"]
    assert compare([train(name="other")]).headline == ("mIoU",)


def test_a_benchmark_of_ones_own_has_one_more_score(masks_file: Path, tmp_path: Path, train: Train) -> None:
    """The example of docs/extending.md."""
    directory = run_into(lesions.main, tmp_path / "own", f"--data_path={masks_file}", *SMALL)
    found, plain = results(directory), results(train())
    assert list(found["test"]) == [*plain["test"], "balanced"]
    assert found["test"]["Dice"] == plain["test"]["Dice"], "its task knows the background, too"
    last = [[*found[key].values()][-1] for key in ("per_class_sensitivity", "per_class_specificity")]
    assert found["test"]["balanced"] == pytest.approx(np.mean(last))


def test_each_user_has_a_row_in_a_table_for_a_paper(train: Train) -> None:
    """By the server's model on test, and by their own models, which the run scored on other images."""
    plain, personal = train(name="plain"), train("--federated.algorithm=ditto", name="personal")
    text = latex_users(compare([plain, personal]), "x")
    (first, *of_test), (second, *of_own) = map(rows_of, re.split(r"(?<=end.table.)\n", text.strip()))
    assert (len(first), len(second)) == (3, 2)
    whole = json.loads((plain / "per_user.json").read_text())
    values = dict(zip(whole["user_ids"], whole["mIoU"], strict=True))
    assert {row[0]: float(re.sub(r"[^\d.]", "", row[1])) for row in of_test[1:]} == pytest.approx(
        {user: round(value, 2) for user, value in values.items()}
    )
    with (personal / "clients.csv").open(newline="") as file:
        own = {row["user"]: row["mIoU"] for row in csv.DictReader(file) if row["model"] == "personal"}
    assert {row[0]: row[1] for row in of_own[1:]} == {u: f"{float(v):.2f}" for u, v in own.items()}
    of_all = results(personal)["clients"]["seen"]["personal"]["users"]["mIoU"]
    assert of_all["mean"] == pytest.approx(np.mean([float(value) for value in own.values()]), abs=1e-3)
    assert "not trained on" in text


def test_test_users_are_scored_one_by_one_if_asked_for(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train()
    found, whole = results(directory), json.loads((directory / "per_user.json").read_text())
    assert len(whole["user_ids"]) == found["per_user"]["users"] == 3
    accuracy = np.average(whole["pixel accuracy"], weights=whole["images"])  # each pixel has a class
    assert accuracy == pytest.approx(found["test"]["pixel accuracy"], abs=1e-3)
    images = np.average(whole["Dice per image"], weights=whole["images"])  # each image has an object
    assert images == pytest.approx(found["test"]["Dice per image"], abs=1e-3)
    assert found["per_user"]["quantiles"]["mIoU"]["mean"] == pytest.approx(np.mean(whole["mIoU"]), abs=1e-3)
    assert "mean of 3 test users" in capsys.readouterr().out
    (group,) = found["clients"].values()
    assert group["images"] == sum(whole["images"])
    assert group["server"]["users"]["mIoU"]["std"] == pytest.approx(np.std(whole["mIoU"]), abs=1e-3)
    kept = train("--federated.algorithm=ditto", "--federated.options.held_out=0", name="kept")
    (group,) = results(kept)["clients"].values()
    assert {*group} >= {"server"}, "its server's model is that of all users"
    without = train("--evaluation.per_user=false", name="without")
    assert not {"per_user", "clients"} & {*results(without)}
    assert not (without / "per_user.json").exists()


def test_a_mean_over_users_counts_those_with_a_score() -> None:
    """Users whose masks are void have none."""
    scores = {"mIoU": 20.0, "pixel accuracy": 30.0}
    found = {"test": scores, "val": scores, "last": {"test": scores}}
    quantiles = {"mIoU": {"n": 2, "mean": 50.0}, "pixel accuracy": {"n": 3, "mean": 60.0}, "x": {"n": 0}}
    experiment = object.__new__(FederatedSegmentation)
    rows = experiment.rows({**found, "per_user": {"split": "test", "users": 4, "quantiles": quantiles}})
    assert {name: row for name, row in rows.items() if name.startswith("mean")} == {
        "mean of 2 test users": {"mIoU": 50.0},
        "mean of 3 test users": {"pixel accuracy": 60.0},
    }
    assert experiment.rows(found).keys() == rows.keys() - {"mean of 2 test users", "mean of 3 test users"}


def test_a_partition_by_class_of_images_of_one_class_is_warned_of(
    train: Train, masks_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the images have several classes, of which one is the commonest."""
    shards, iid = (f"--data.partition={kind}-clients-3-seed-0" for kind in ("shards-2", "iid"))
    with DataFile(masks_file) as file:

        def warning(partition: str) -> str | None:
            return FederatedSegmentation(parse(["--config=camvid-fl", partition]), file).warning()

        assert warning(shards) is None
        monkeypatch.setattr(of_file, "MOST_ALIKE", 0.1)
        assert warning(iid) is None
    train(shards, "--federated.num_rounds=1")
    assert "With these images, a partition by class, such as lda" in capsys.readouterr().err


def test_both_engines_train_the_same_and_a_killed_run_goes_on_to_the_same_end(train: Train) -> None:
    whole = weights(killed_and_resumed(train, 1)[0])
    stock = weights(train("--runtime.engine=stock", name="stock"))
    assert np.linalg.norm(stock - whole) <= 1e-5 * np.linalg.norm(whole)


def test_a_private_run_says_what_it_promises(train: Train) -> None:
    words = ("--recipe=private", "--federated.cohort_size=8", "--privacy.noise_seed=run")
    directory = train(*words)
    assert "epsilon = 2" in json.loads((directory / "privacy.json").read_text())["paragraph"]
    assert results(directory)["test"]["loss"] > 0
    assert "clients" not in results(directory), "who of test is a training user"


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--model.arch=resnet18"], "model.arch is resnet18, which has outputs for a whole image"),
        (["--model.arch=unet_lite0"], "model.arch is 'unet_lite0', which is not a known network"),
        (
            ["--model.parties=4", "--federated.algorithm=vertical"],
            "of which each party has others: set model.",
        ),
        (["--federated.reweight=fedir"], "Segmentation has no form with importance weights"),
        (["--augment.cutmix=1"], "mix labels of whole images, which Segmentation does not have: set both to"),
        (["--data.taxonomy=labels"], "has no masks, but this task needs a class for each pixel: set"),
        (["--data.val_share=0.2"], "already has a split 'val': set data.val_share to 0 to use it"),
        (["--data.val_share=1"], "data.val_share is 1: give a number of at least 0 and below 1"),
        (["--recipe=private", "--data.val_share=0.2"], "privacy refuses data.val_share = 0.2"),
        (["--data.partition=nope"], "has no partition 'nope'"),
        (
            ["--evaluation.best_by=accuracy"],
            "input should be 'loss', 'mIoU', 'Dice', 'Dice per image' or 'last'",
        ),
        ([*LITE, "--model.normalisation=imagenet"], "set it to efficientnet_lite"),
        *(
            ([f"--federated.algorithm={name}"], "ends in a convolution")
            for name in ("fedncm", "fed3r", "fedcof")
        ),
        (["--federated.algorithm=moon"], "moon needs one feature vector for each image, which networks for"),
        (["--federated.algorithm=moon", "--model.arch=plain"], "moon needs one feature vector"),
        *(
            ([f"--federated.algorithm={name}", "--model.arch=plain"], "ends in a convolution")
            for name in ("fedncm", "fed3r")
        ),
        ([*LITE, "--model.trained=head", "--augment.views=3"], "the layer decoder takes several maps"),
        (
            ["--model.channel_norm=data", "--model.trained=head"],
            "has no norm for it: set it to group",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_line(refused: Refused, words: list[str], reason: str) -> None:
    assert not (refused(reason, *words) / "config.yaml").exists()


def test_a_file_without_val_needs_a_share(tmp_path: Path, masks_file: Path) -> None:
    with DataFile(masks_file) as file:
        file.splits = tuple(name for name in file.splits if name != "val")
        with pytest.raises(ValueError, match="has no val split, and data"):
            FederatedSegmentation(parse(["--config=camvid-fl"]), file)


def test_a_network_for_pixels_is_refused_for_labels() -> None:
    config = FLAIR.parse(["--config=fl-r-17", "--model.arch=unet_resnet18"]).config
    with pytest.raises(
        ValueError, match=r"outputs for each pixel, .* a whole image: choose another, as resnet18"
    ):
        build_model(config, 17, None, MultiLabel())


@pytest.mark.parametrize("name", SEGMENTATION.settings)
def test_every_setting_is_whole_alone_and_at_the_mini_scale(name: str) -> None:
    assert parse([f"--config={name}"]).config.setting == name
    assert parse([f"--config={name}", "--scale=mini"]).config.data.partition is None


def test_the_view_gives_images_with_their_masks(masks_file: Path, tmp_path: Path) -> None:
    """Scaled to the class at each pixel's centre; the same with and without memory for them."""
    validate(masks_file)
    with DataFile(masks_file) as file:
        kept, bare = (MaskView(file, image_size=8, cache_bytes=size).split("train") for size in (1 << 20, 0))
        whole = MaskView(file, image_size=16).split("train")
        rows = np.array([3, 0, 3])
        for _ in range(2):
            assert all(np.array_equal(a, b) for a, b in zip(kept.read(rows), bare.read(rows)))
        assert np.array_equal(kept.targets(rows), whole.targets(rows)[:, 1::2, 1::2])
        assert whole.num_images == file.split("train").num_images
        dealt = MaskView(file, image_size=8, val_share=0.0).split("val")
        assert dealt.num_images == file.split("val").num_images
    labels = tmp_path / "labels.hdf5"
    write_mini(labels, SPEC)
    with DataFile(labels) as file, pytest.raises(ValueError, match=r"has no masks, .* set data.taxonomy to"):
        MaskView(file, taxonomy="labels")


def test_drawn_outlines_are_where_the_shapes_are() -> None:
    """Every label of an image has pixels of its class, no other class has, and colours differ across it."""
    index = masked_index(replace(SPEC, image_size=32, difficulty=0.0))
    split = index.splits["train"]
    masks, labels = split.annotations["mask"], split.labels["labels"]
    assert isinstance(masks, Masks)
    images = draw_images(replace(SPEC, image_size=32, difficulty=0.0), index, "train", np.arange(len(masks)))
    contrast = []
    for row, image in enumerate(images):
        mask = masks.read(row)
        (label,) = labels.indices[labels.indptr[row] : labels.indptr[row + 1]].tolist()
        assert set(np.unique(mask).tolist()) <= {0, label + 1}
        if 20 < (mask > 0).sum() < mask.size - 20:
            inside, outside = image[mask > 0].mean(0), image[mask == 0].mean(0)
            contrast.append(np.abs(inside - outside).max())
    assert len(contrast) > len(masks) / 2
    assert np.median(contrast) > 20, "levels of 255 between a shape and what lies around it"


def test_users_masks_are_predicted_with_the_model_of_their_cluster(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--federated.algorithm=ifca", "--model.init=xavier", "--runtime.keep_checkpoints=true")
    whole, directory = killed_and_resumed(train, 1, *options)
    assert results(directory)["clients"] == results(whole)["clients"]
    assert "personal" in results(whole)["clients"]["seen"], "not those that every run of masks has"
    assert np.array_equal(weights(directory), weights(whole))
    row = (directory / "clients.csv").read_text().splitlines()[1].split(",")
    assert row[0] == "seen"
    capsys.readouterr()
    assert run(predict, [str(directory), f"--user={row[2]}", f"--output={tmp_path / 'masks'}"]) == 0
    assert [*(tmp_path / "masks").rglob("*.png")]


def test_users_are_scored_in_the_precision_of_their_split(
    train: Train, scored_by_autocast: list[bool]
) -> None:
    train("--runtime.precision=bf16", "--runtime.engine=stock", "--evaluation.per_user=true")
    assert scored_by_autocast
    assert all(scored_by_autocast)
