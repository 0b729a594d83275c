"""SSDLite and Faster R-CNN: torchvision's layers, sizes and proposals; draws that follow from keys alone."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision.models as zoo
from torch import Tensor, nn
from torchvision.models.detection import fasterrcnn_resnet50_fpn, ssdlite320_mobilenet_v3_large
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.ssdlite import SSDLiteHead, _mobilenet_extractor
from torchvision.ops import MultiScaleRoIAlign

from pfl_ext.data.transforms import CROP_COLUMNS, draw_keys
from pfl_ext.models.classifier import FrozenStatisticsBatchNorm2d, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.decoders import EncoderDecoder, draws, encoder_of, outputs_of, task_of, taught
from pfl_ext.models.dropout import dropping
from pfl_ext.models.faster_rcnn import CANONICAL, COMPARED, OVERLAP, POOLED, RATIOS, SIDES, FasterRCNN
from pfl_ext.models.pretrained import source_of
from pfl_ext.models.small import NETWORKS
from pfl_ext.models.ssdlite import SSDLite, _norm
from pfl_ext.models.trained import new_part
from pfl_ext.models.weights import IMAGENET
from pfl_ext.tasks import detection_rcnn as rcnn
from pfl_ext.tasks.detection import MOST, Detection
from pfl_ext.tasks.detection_scores import CLASS, NO_BOX
from pfl_ext.tasks.detection_ssd import SSDDetection
from tests.pfl_ext.models.test_segmentation_models import NO_DROPOUT, REFUSED
from tests.pfl_ext.tasks.test_detection import made_boxes
from tests.pfl_ext.tasks.test_detection_anchors import compared
from tests.pfl_ext.tiny_detector import Tiny

CLASSES, SIDE = 3, 64
KINDS = ("ssdlite", "fasterrcnn")


def built(arch: str, weights: Any = None, classes: int = 4, **options: Any) -> EncoderDecoder:
    config = ModelConfig(arch, input_size=32, pretrained=weights is not None, **options)
    network = build_backbone(config, classes, torch.Generator().manual_seed(0), weights)
    assert isinstance(network, EncoderDecoder)
    return network


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_networks_are_as_large_as_torchvisions() -> None:
    with torch.device("meta"):
        ours = NETWORKS["ssdlite_mobilenet_v3_large"](90, 320)
        theirs: nn.Module = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=91)
        assert parameters(ours) == parameters(theirs) == 3_440_060
        wide: Any = NETWORKS["ssdlite_mobilenet_v3_large"]
        ours = wide.build(20, ModelConfig(pretrained=True))
        whole = zoo.mobilenet_v3_large(weights=None).state_dict()
        of_encoder = ours.encoder.state_dict()
        assert {name: t.shape for name, t in of_encoder.items()} == {
            name: t.shape for name, t in whole.items() if not name.startswith("classifier")
        }
        layers = _mobilenet_extractor(zoo.mobilenet_v3_large(weights=None), 6, nn.BatchNorm2d)
        head = SSDLiteHead([672, 960, 512, 256, 256, 128], [6] * 6, 21, nn.BatchNorm2d)
        assert parameters(ours) == parameters(layers) + parameters(head)
        ours = NETWORKS["fasterrcnn_resnet50"](90, 64)
        theirs = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
        assert parameters(ours) == parameters(theirs) == 41_808_406
    assert parameters(NETWORKS["fasterrcnn_efficientnet_lite0"](7, 64)) < 5e6


@pytest.mark.parametrize(
    "arch, encoder, task",
    [
        ("ssdlite_mobilenet_v3_large", "mobilenet_v3_large", SSDDetection),
        ("ssdlite_efficientnet_lite0", "efficientnet_lite0", SSDDetection),
        ("fasterrcnn_resnet18", "resnet18", rcnn.FasterRCNNDetection),
        ("fcos_resnet18", "resnet18", Detection),
    ],
)
def test_a_network_says_its_task_and_whether_it_draws(arch: str, encoder: str, task: type) -> None:
    assert (encoder_of(arch), outputs_of(arch)) == (encoder, "boxes")
    assert type(task_of(arch, Detection)(3)) is task
    assert draws(ModelConfig(arch)) == (task is rcnn.FasterRCNNDetection)
    assert type(task_of("resnet18", Detection)(3)) is Detection
    ours, theirs = source_of(arch), source_of(encoder)
    assert ours is not None
    assert theirs is not None
    assert ours.name == theirs.name


@torch.no_grad()
@pytest.mark.parametrize("side", [64, 150])
@pytest.mark.parametrize(
    "arch, first, of_a_cell, offset",
    [("fasterrcnn_efficientnet_lite0", 4, 3, 0), ("ssdlite_efficientnet_lite0", 16, 6, 0.5)],
)
def test_anchors_divide_the_image_evenly_whatever_its_side(
    arch: str, first: int, of_a_cell: int, offset: float, side: int
) -> None:
    """As torchvision's do where the side is a multiple of all strides."""
    config = ModelConfig(arch, input_size=side)
    network = build_backbone(config, CLASSES, torch.Generator().manual_seed(0))
    outputs = network(torch.zeros(1, 3, side, side))
    if arch.startswith("ssdlite"):
        anchors = outputs[0, :, -5:-1]
    else:
        anchors = rcnn.split(outputs, CLASSES).anchors[0]
        pyramid = [torch.zeros(1, 1, n, n) for n in (16, 8, 4, 2, 1)]
        (theirs,) = AnchorGenerator(tuple((n,) for n in SIDES), (RATIOS,) * 5)(
            ImageList(torch.zeros(1, 3, 64, 64), [(64, 64)]), pyramid
        )
        assert side != 64 or torch.equal(anchors, theirs)
    cells = -(-side // first)
    centres = (anchors[:, :2] + anchors[:, 2:])[: of_a_cell * cells**2] / 2
    x, y = centres.view(cells, cells, of_a_cell, 2).unbind(3)
    expected = (torch.arange(cells) + offset) * side / cells
    torch.testing.assert_close(x, expected[None, :, None].expand_as(x), rtol=0, atol=1e-4)
    torch.testing.assert_close(y, expected[:, None, None].expand_as(y), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_maps_of_ssdlite_are_torchvisions() -> None:
    torch.manual_seed(1)
    network = NETWORKS["ssdlite_mobilenet_v3_large"](4, 320).eval()
    assert isinstance(network, EncoderDecoder)
    decoder = network.decoder
    assert isinstance(decoder, SSDLite)
    backbone = zoo.mobilenet_v3_large(weights=None, reduced_tail=True)
    theirs = _mobilenet_extractor(backbone, 6, _norm).eval()
    for ours, other in ((network.encoder, theirs.features), (decoder.extra, theirs.extra)):
        pairs = zip(other.state_dict().items(), ours.state_dict().values(), strict=True)
        other.load_state_dict({name: tensor for (name, _), tensor in pairs})
    images = torch.rand(2, 3, 96, 96)
    levels = network.encoder(images)
    for block in decoder.extra:
        levels.append(block(levels[-1]))
    for level, expected in zip(levels, theirs(images).values(), strict=True):
        torch.testing.assert_close(level, expected)
    outputs = network(images)
    sides = [level.shape[2] for level in levels]
    assert outputs.shape == (2, 6 * sum(side**2 for side in sides), 5 + 4 + 4 + 1)
    assert torch.equal(outputs[..., -1], torch.full_like(outputs[..., -1], 96))


def tiny_rcnn() -> tuple[FasterRCNN, list[Tensor], Tensor]:
    """A decoder, maps and images."""
    torch.manual_seed(0)
    network = Tiny("fasterrcnn")(CLASSES, SIDE).eval()
    decoder = network.decoder
    assert isinstance(decoder, FasterRCNN)
    for layer in (decoder.first.cls_logits, decoder.first.bbox_pred, decoder.predictor.bbox_pred):
        nn.init.normal_(layer.weight, std=0.3)
    images = torch.rand(2, 3, SIDE, SIDE)
    return decoder, network.encoder(images), images


@torch.no_grad()
def test_proposals_and_detections_of_faster_rcnn_are_torchvisions() -> None:
    decoder, maps, images = tiny_rcnn()
    both = {"training": COMPARED, "testing": COMPARED}, dict.fromkeys(("training", "testing"), rcnn.PROPOSALS)
    first = RegionProposalNetwork(decoder.anchors, decoder.first, 0.7, 0.3, 256, 0.5, *both, OVERLAP).eval()
    features = decoder.pyramid(OrderedDict((str(number), x) for number, x in enumerate(maps[1:])))
    shapes = [(SIDE, SIDE)] * len(images)
    proposals, _ = first(ImageList(images, shapes), features)
    pool = MultiScaleRoIAlign(list("0123"), POOLED, 2, canonical_scale=CANONICAL)
    second = RoIHeads(
        pool, decoder.second, decoder.predictor, 0.5, 0.5, 128, 0.25, None, rcnn.LEAST_SCORE, 0.5, MOST
    ).eval()
    expected, _ = second(features, proposals, shapes)
    outputs = decoder(maps, images)
    parts = rcnn.split(outputs, CLASSES)
    for mine, draws_, theirs in zip(parts.proposals, parts.draws, proposals):
        there = draws_ != rcnn.NOT_THERE
        torch.testing.assert_close(mine[there], theirs)
        assert len(theirs) > 20
    _, kept = rcnn.FasterRCNNDetection(CLASSES).scored(outputs, made_boxes(0, 2))
    for rows, theirs_ in zip(kept[:, :MOST], expected):
        compared(rows, theirs_["boxes"], theirs_["labels"] - 1, theirs_["scores"])
    assert (kept[:, :MOST, CLASS] != NO_BOX).any()


def in_training(seed: int, rows: list[int], targets: Tensor) -> rcnn.Parts:
    """Outputs for these of four images, each with its key."""
    decoder, _, _ = tiny_rcnn()
    draw = torch.Generator().manual_seed(3)
    maps = [torch.randn(4, c, n, n, generator=draw) for c, n in zip((4, 4, 8, 8, 8), (32, 16, 8, 4, 2))]
    keyed = draw_keys(np.random.default_rng(seed), np.zeros((4, CROP_COLUMNS), np.float32))
    crops = torch.from_numpy(keyed)[rows]
    with torch.no_grad(), dropping(crops), taught(targets[rows]):
        outputs = decoder([x[rows] for x in maps], torch.zeros(len(rows), 3, SIDE, SIDE))
    return rcnn.split(outputs, CLASSES)


def test_what_is_sampled_follows_from_an_images_own_key() -> None:
    targets = made_boxes(5, 4)
    together, alone, other = (
        in_training(seed, rows, targets) for seed, rows in ((0, [0, 1, 2, 3]), (0, [2]), (1, [0, 1, 2, 3]))
    )
    assert torch.equal(together.draws[2], alone.draws[0])
    torch.testing.assert_close(together.proposals[2], alone.proposals[0])
    torch.testing.assert_close(together.logits[2], alone.logits[0], rtol=1e-4, atol=1e-5)
    assert not torch.equal(together.draws[2], together.draws[3])
    assert not torch.equal(together.draws, other.draws)
    assert not torch.equal(together.anchor_draws, other.anchor_draws)


def test_true_boxes_are_proposed_in_training_and_a_sample_goes_on() -> None:
    targets = made_boxes(5, 4)
    parts = in_training(0, [0, 1, 2, 3], targets)
    there = parts.draws != rcnn.NOT_THERE
    assert (there.sum(1) <= rcnn.PROPOSALS_SAMPLED).all()
    for boxes, mine, known in zip(parts.proposals, there, targets):
        for box in known[known[:, CLASS] != NO_BOX][:, :4]:
            assert (boxes[mine] == box).all(1).any()
    decoder, maps, images = tiny_rcnn()
    with taught(targets[:2]), pytest.raises(AssertionError, match="images of training bring keys"):
        decoder(maps, images)


@pytest.mark.parametrize("kind", KINDS)
def test_pretrained_weights_are_the_encoders_and_the_detector_is_new_and_without_batchnorm(kind: str) -> None:
    network = built(arch := f"{kind}_efficientnet_lite0", IMAGENET)
    published = torch.load(source_of("efficientnet_lite0").path(), weights_only=True)  # type: ignore[union-attr]
    assert torch.equal(network.encoder.get_parameter("stem.conv.weight"), published["_conv_stem.weight"])
    theirs = dict(built(arch).decoder.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in network.decoder.named_parameters())
    kinds = [{type(m) for m in part.modules()} for part in (network.encoder, network.decoder)]
    assert [FrozenStatisticsBatchNorm2d in found for found in kinds] == [True, False]
    assert new_part(network) == "decoder"


@pytest.mark.parametrize("kind, part", zip(KINDS, ("classes", "predictor")))
def test_a_run_is_taken_up_with_its_detector_but_for_what_depends_on_classes(
    kind: str, part: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    first = {name: t + 1 for name, t in built(f"{kind}_efficientnet_lite0", IMAGENET).state_dict().items()}
    safetensors.torch.save_file({f"backbone.{name}": t for name, t in first.items()}, file)
    for keep_head, classes in ((True, 4), (False, 9)):
        again = built(f"{kind}_efficientnet_lite0", file, classes, keep_head=keep_head)
        new = {name for name, p in again.named_parameters() if not torch.equal(p, first[name])}
        layer = f"decoder.{part}."
        expected = {name for name, _ in again.named_parameters() if name.startswith(layer)}
        assert new == (set() if keep_head else expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options, reason", [*REFUSED, ({"dropout": True}, NO_DROPOUT)])
def test_what_a_detector_does_not_go_with_is_refused(kind: str, options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        built(f"{kind}_efficientnet_lite0", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_encoder_leaves_the_detector_to_be_trained(kind: str) -> None:
    network = built(f"{kind}_efficientnet_lite0", trained="head")
    assert all(p.requires_grad for p in network.decoder.parameters())
    assert not any(p.requires_grad for p in network.encoder.parameters())
