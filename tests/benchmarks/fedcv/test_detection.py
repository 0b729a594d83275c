"""Federated detection end to end on a tiny file: engines, privacy, a kill, pictures, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from benchmarks.core.experiment import build_model
from benchmarks.fedcv.detection.config import DETECTION, parse
from benchmarks.fedcv.detection.train import FederatedDetection, main
from benchmarks.fedcv.segmentation.config import SEGMENTATION
from dataset.flair.mini import write_mini
from dataset.flair.mini_draw import COARSE_LABELS
from dataset.flair.mini_outlines import boxed_index, masked_index, write_boxed, write_masked
from dataset.store.annotations import CROWD, Boxes, Masks, offsets_of
from dataset.store.box_view import NO_BOX, BoxView
from dataset.store.hdf5 import DataFile
from dataset.store.index import in_another_split
from dataset.store.validate import validate
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks import detection_scores
from pfl_ext.tasks.detection import Detection
from pfl_ext.tasks.segmentation import Segmentation
from tests.benchmarks.conftest import TINY, Refused, Train, killed_and_resumed
from tests.benchmarks.run_files import error_line, lines, results, weights
from tests.benchmarks.sparing import run_into
from tests.pfl_ext.tiny_detector import Tiny

SPEC = replace(
    TINY, image_size=16, train_users=8, val_users=3, test_users=3, coarse_labels=1, num_fine_labels=17
)
SMALL = (
    "--data.image_size=16",
    "--model.input_size=16",
    "--model.arch=tiny",
    "--model.groups=2",
    "--model.normalisation=half",
    "--model.pretrained=false",
    "--local.batch_size=4",
    "--federated.num_rounds=2",
    "--federated.cohort_size=3",
    "--data.val_share=0",
    "--evaluation.every_rounds=1",
    "--evaluation.best_by=last",
    "--runtime.progress=false",
    "--runtime.checkpoint_every=1",
)
LITE = (
    "--model.arch=fcos_efficientnet_lite0",
    "--model.normalisation=efficientnet_lite",
    "--model.pretrained=true",
)
RARE = ("--evaluation.every_rounds=9",)
SHORT = ("--federated.num_rounds=1", *RARE)
PRIVATE = ("--recipe=private", "--federated.cohort_size=8", "--privacy.noise_seed=run")
OTHERS = ("ssdlite", "fasterrcnn")
"""Detectors besides FCOS."""


@pytest.fixture(scope="module")
def boxes_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "boxes.hdf5"
    write_boxed(path, SPEC)
    return path


@pytest.fixture
def train(boxes_file: Path, tmp_path: Path) -> Train:
    """Run the training command on the tiny data set; the run directory."""

    def call(*argv: str, name: str = "run", code: int = 0, draw: bool = False) -> Path:
        words = (f"--data_path={boxes_file}", *SMALL, *argv)
        return run_into(main, tmp_path / name, *words, code=code, draw=draw)

    return call


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    NETWORKS.names()
    monkeypatch.setitem(NETWORKS._things, "tiny", Tiny())
    for kind in OTHERS:
        monkeypatch.setitem(NETWORKS._things, f"tiny_{kind}", Tiny(kind))


def test_a_run_leaves_scores_of_each_class_and_of_the_clients_and_pictures(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(draw=True)
    found = results(directory)
    known = [value for value in found["per_class_ap"].values() if value is not None]
    assert list(found["per_class_ap"]) == list(COARSE_LABELS)
    assert found["test"]["mAP"] == pytest.approx(np.mean(known))
    assert found["test"]["mAP50"] >= found["test"]["mAP"]
    users = json.loads((directory / "per_user.json").read_text())
    assert found["per_user"] == {key: users[key] for key in ("split", "users", "quantiles")}
    assert (users["split"], users["users"]) == ("test", 3)
    assert users["quantiles"]["mAP"]["mean"] == pytest.approx(np.mean(users["mAP"]), abs=1e-3)
    assert "mean of 3 test users" in capsys.readouterr().out
    assert found["partition"]["users"] == 8
    for picture in ("boxes", "per_class_ap", "per_user", "training_curve"):
        assert (directory / "plots" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


def file_of_authors(path: Path) -> Path:
    """Two users of test train, too; there they have another name, as in files of VOC and COCO by author."""
    index = boxed_index(SPEC)
    users = [in_another_split(user, "test") for user in list(index.splits["train"].user_ids)[:2]]
    test = replace(index.splits["test"], user_ids=[*users, "0"])
    write_mini(path, SPEC, index=replace(index, splits={**index.splits, "test": test}))
    return path


def test_a_private_run_names_the_split_whose_users_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"--data_path={file_of_authors(tmp_path / 'f.hdf5')}", *SMALL, *SHORT)
    run_into(main, tmp_path / "run", *words, *PRIVATE, "--recipe=tracked+private", code=2)
    assert "but 2 users of test are also in train, for example " in error_line(capsys)


def test_users_of_test_who_train_count_as_seen_and_namesakes_of_clients_do_not(tmp_path: Path) -> None:
    path = file_of_authors(tmp_path / "authors.hdf5")
    for partition in ("none", "iid-clients-3-seed-0"):
        words = (f"--data_path={path}", *SMALL, *SHORT, f"--data.partition={partition}")
        found = results(run_into(main, tmp_path / partition, *words))["clients"]
        assert {group: scored["users"] for group, scored in found.items()} == {"seen": 2, "new": 1}


def test_both_engines_train_the_same_and_a_killed_run_goes_on_to_the_same_end(train: Train) -> None:
    whole = weights(killed_and_resumed(train, 1, *RARE)[0])
    stock = weights(train("--runtime.engine=stock", *RARE, name="stock"))
    assert np.linalg.norm(stock - whole) <= 1e-5 * np.linalg.norm(whole)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_detectors_are_trained_by_both_engines_and_a_killed_run_goes_on_to_the_bit(
    train: Train, kind: str
) -> None:
    arch = (f"--model.arch=tiny_{kind}", *RARE)
    directory, _ = killed_and_resumed(train, 1, *arch, draw=True)
    whole = weights(directory)
    stock = weights(train(*arch, "--runtime.engine=stock", name="stock"))
    assert np.linalg.norm(stock - whole) <= 1e-4 * np.linalg.norm(whole)
    found = results(directory)
    assert {"loss", "mAP", "mAP50"} <= found["test"].keys()
    assert found["per_user"]["users"] == 3
    assert (directory / "plots" / "boxes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", OTHERS)
def test_other_detectors_are_trained_privately_centrally_and_by_other_algorithms(
    train: Train, boxes_file: Path, tmp_path: Path, kind: str
) -> None:
    arch = f"--model.arch=tiny_{kind}"
    private = train(*PRIVATE, *SHORT, arch, name="private")
    assert "epsilon = 8" in json.loads((private / "privacy.json").read_text())["paragraph"]
    assert results(train("--recipe=scaffold", *SHORT, arch, name="scaffold"))["test"]["loss"] > 0
    kept = [word for word in SMALL if not word.startswith(("--local", "--federated", "--evaluation.every"))]
    central = ("--recipe=centralised", *kept, "--centralised.num_epochs=1", arch)
    directory = run_into(main, tmp_path / "c", f"--data_path={boxes_file}", *central)
    assert results(directory)["test"]["loss"] > 0


@pytest.mark.parametrize("recipe", ["fedprox", "fednova", "scaffold"])
def test_other_algorithms_train_detectors(train: Train, recipe: str) -> None:
    assert results(train(f"--recipe={recipe}", *SHORT, "--runtime.engine=stock"))["test"]["loss"] > 0


def test_a_detector_is_trained_centrally(boxes_file: Path, tmp_path: Path) -> None:
    kept = [word for word in SMALL if not word.startswith(("--local", "--federated", "--evaluation.every"))]
    words = ("--recipe=centralised", *kept, "--centralised.num_epochs=1", "--runtime.engine=stock")
    directory = run_into(main, tmp_path / "c", f"--data_path={boxes_file}", *words)
    assert results(directory)["test"]["loss"] > 0


def test_private_runs_say_what_they_promise_and_follow_test_where_there_is_no_val(train: Train) -> None:
    directory = train(*PRIVATE, *SHORT)
    assert "epsilon = 8" in json.loads((directory / "privacy.json").read_text())["paragraph"]
    tracked = train("--recipe=tracked+private", *PRIVATE[1:], *SHORT, name="tracked")
    scored = lines(tracked)
    assert not any("val" in line for line in scored)
    assert "val" not in results(tracked)
    assert scored[-1]["tracked"]["mAP"] == pytest.approx(results(tracked)["test"]["mAP"], abs=1e-5)
    assert np.array_equal(weights(tracked), weights(directory)), "what is scored changes no weight"


def test_a_loss_of_boxes_that_depends_on_other_images_is_not_private(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Detection.image_losses

    def contrasted(task: Detection, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = own(task, outputs, targets)
        return losses - 0.5 * losses.mean()

    monkeypatch.setattr(Detection, "image_losses", contrasted)
    refused("Detection.image_losses gives an image another loss", *PRIVATE, *SHORT)


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--model.arch=resnet18"], "has outputs for a whole image, and this task needs them for boxes"),
        (["--model.arch=unet_resnet18"], "choose another, as fcos_efficientnet_lite0"),
        (["--federated.reweight=fedir"], "Detection has no form with importance weights"),
        (["--data.taxonomy=labels"], "has no boxes, but this task needs a class and a box for each object"),
        (["--data.val_share=0.2"], "already has a split 'val': set data.val_share to 0 to use it"),
        (["--data.val_share=1"], "data.val_share is 1: give a number of at least 0 and below 1"),
        (["--data.scored=test", "--data.val_share=0.1"], "data.val_share has no effect if data.scored is"),
        (["--data.scored=test", "--evaluation.best_by=mAP"], "which would choose a model by its test score"),
        (["--recipe=private", "--data.val_share=0.2"], "privacy refuses data.val_share = 0.2"),
        (["--data.partition=nope"], "(python -m dataset.partitions --help lists all kinds)"),
        (["--augment.padding=reflect"], "boxes cannot be mirrored at the border of an image: set it to zero"),
        (["--model.init=keras"], "a chance of 1/2 at every place of an image: choose torchvision"),
        (
            ["--augment.mixup=1"],
            "mix labels of whole images, which Detection does not have: set both to none",
        ),
        (["--model.dropout=true"], "has no dropout: set model.dropout to false"),
        *(
            ([f"--federated.algorithm={name}"], "ends in a convolution")
            for name in ("fedncm", "fed3r", "fedcof")
        ),
        (["--model.trained=head", "--augment.views=3"], "the layer decoder takes several maps"),
        (["--model.bottleneck=8"], "ends in a convolution, before which there is no bottleneck"),
        (["--model.arch=tiny_ssdlite", "--federated.algorithm=fedncm"], "ends in a convolution"),
        (["--model.arch=tiny_fasterrcnn", "--federated.algorithm=fed3r"], "ends in a convolution"),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_line(refused: Refused, words: list[str], reason: str) -> None:
    assert not (refused(reason, *words) / "config.yaml").exists()


def test_a_file_without_val_needs_a_share_or_follows_test(boxes_file: Path) -> None:
    with DataFile(boxes_file) as file:
        file.splits = tuple(name for name in file.splits if name != "val")
        words = ["--config=street-fl", "--data.image_size=16", "--model.input_size=16"]
        with pytest.raises(ValueError, match=r"give data\.val_share, as 0\.1, or set data.scored to test"):
            FederatedDetection(parse([*words, "--data.val_share=0"]), file)
        assert FederatedDetection(parse([*words, "--recipe=tracked"]), file).final_splits == ("test",)


def test_a_file_without_test_says_how_val_becomes_test(boxes_file: Path) -> None:
    with DataFile(boxes_file) as file:
        file.splits = tuple(name for name in file.splits if name != "test")
        with pytest.raises(ValueError, match=r"has no images of test: .* --val_as test, which makes"):
            FederatedDetection(parse(["--config=street-fl", "--data.val_share=0"]), file)


def test_users_who_do_not_train_can_be_test(boxes_file: Path) -> None:
    """Their boxes, too, and whether the file has a test split or not."""
    with DataFile(boxes_file) as file:
        names = list(file.split("train").user_ids)[1:3]
        words = ["--config=street-fl", "--data.val_share=0", "--data.image_size=16", "--model.input_size=16"]
        whole = FederatedDetection(parse(words), file).split("train")
        file.splits = ("train", "val")
        experiment = FederatedDetection(parse([*words, f"--data.test_users={names[1]}, {names[0]}"]), file)
        test, train = experiment.split("test"), experiment.split("train")
        assert (list(test.user_ids), {*train.user_ids}) == (names, {*whole.user_ids} - {*names})
        theirs = np.arange(*whole.user_offsets[[1, 3]])
        assert np.array_equal(test.targets(theirs - theirs[0]), whole.targets(theirs))


def test_a_network_for_boxes_is_refused_for_pixels() -> None:
    config = SEGMENTATION.parse(["--model.arch=fcos_resnet18"]).config
    with pytest.raises(ValueError, match=r"outputs for boxes, .* each pixel: choose another, as deeplab"):
        build_model(config, 17, None, Segmentation(17))


@pytest.mark.parametrize("name", DETECTION.settings)
def test_every_setting_is_whole_alone_and_at_the_mini_scale(name: str) -> None:
    assert parse([f"--config={name}"]).config.setting == name
    assert parse([f"--config={name}", "--scale=mini"]).config.data.partition is None


def test_the_view_gives_images_with_their_boxes(boxes_file: Path, tmp_path: Path) -> None:
    """Scaled by width and height apart, padded to the most of all splits, with their flags."""
    validate(boxes_file)
    with DataFile(boxes_file) as file:
        view, split = BoxView(file, image_size=8), file.split("train")
        store, rows = view.split("train"), np.array([3, 0, 3])
        boxes = split.annotations["objects"]
        assert isinstance(boxes, Boxes)
        images, targets = store.read(rows)
        assert images.shape == (3, 8, 8, 3)
        assert targets.shape == (3, view.most, 6)
        for row, target in zip(rows.tolist(), targets):
            corners, classes = boxes.read(row)
            assert np.array_equal(target[: len(corners), :4], corners / 2)
            assert np.array_equal(target[: len(corners), 4], classes)
            assert (target[len(corners) :, 4] == NO_BOX).all()
        assert store.num_images == split.num_images
        object.__setattr__(split, "image_sizes", np.full((split.num_images, 2), (16, 32), np.int32))
        flagged = Boxes(
            boxes.indptr, boxes.corners, boxes.classes, np.full_like(boxes.flags, CROWD), boxes.num_labels
        )
        wide = replace(BoxView(file, image_size=8).split("train"), boxes=flagged).targets(rows)
        assert np.array_equal(wide[..., :4:2], targets[..., :4:2] / 2)
        assert np.array_equal(wide[..., 1:4:2], targets[..., 1:4:2])
        assert np.array_equal(wide[..., 5] == CROWD, wide[..., 4] != NO_BOX)
        assert store.targets(rows[:0]).shape == (0, view.most, 6)
    masks = tmp_path / "masks.hdf5"
    write_masked(masks, SPEC)
    with DataFile(masks) as file, pytest.raises(ValueError, match=r"has no boxes, .* set data.taxonomy to"):
        BoxView(file, taxonomy="mask")


def test_what_the_file_and_the_task_call_a_box_is_the_same() -> None:
    assert (detection_scores.NO_BOX, detection_scores.CROWD) == (NO_BOX, CROWD)


def test_a_drawn_box_is_around_what_shows_of_its_shape() -> None:
    """With one shape an image, the box of its class is that of its pixels in the mask."""
    spec = replace(SPEC, image_size=24)
    masks, boxes = (index(spec).splits["train"].annotations for index in (masked_index, boxed_index))
    mask, objects = masks["mask"], boxes["objects"]
    assert isinstance(mask, Masks)
    assert isinstance(objects, Boxes)
    for row in range(len(mask)):
        classes = np.unique(pixels := mask.read(row))
        corners, labels = objects.read(row)
        assert set(labels + 1) == set(classes) - {0}
        for label in set(labels.tolist()):
            y, x = np.nonzero(pixels == label + 1)
            mine = corners[labels == label]
            around = [*mine[:, :2].min(0), *mine[:, 2:].max(0)]
            assert around == [x.min(), y.min(), x.max() + 1, y.max() + 1]
    assert np.array_equal(objects.indptr, offsets_of(np.diff(objects.indptr)))
