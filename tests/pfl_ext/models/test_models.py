"""Networks: no live BatchNorm, reproducible initialisation, weights that fit exactly, pfl's contract."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from pfl_ext.data.transforms import draw_crops
from pfl_ext.models.classifier import (
    FrozenStatisticsBatchNorm2d,
    ImageClassifier,
    assert_no_live_batchnorm,
    build_backbone,
    probe_checksum,
)
from pfl_ext.models.config import Init, ModelConfig
from pfl_ext.models.trained import head_of
from pfl_ext.models.weights import read_weights
from pfl_ext.tasks.multi_label import MultiLabel
from tests.closeness import assert_close_as_vector

pytestmark = pytest.mark.xdist_group("models")
"""One process runs them all: `drawn_once` remembers networks."""

RESNET18 = 2 * 20 * 68
"""Roundings: twenty layers on each side. A sum of 4,608 terms counts its square root, for its roundings go
up as often as down."""

ARCHES = ("mobilenet_v2", "efficientnet_b0", "resnet50")


def build(
    arch: str = "resnet18",
    labels: int = 17,
    pretrained: bool = False,
    weights: str | Path | None = None,
    **more: Any,
) -> nn.Module:
    """As `drawn`; what no file has a part in is drawn once and copied, in a tenth of the time."""
    if weights is not None:
        return drawn(arch, labels, pretrained, weights, **more)
    return copy.deepcopy(drawn_once(arch, labels, pretrained, **more))


def drawn(
    arch: str,
    labels: int = 17,
    pretrained: bool = False,
    weights: str | Path | None = None,
    init: Init = "keras",
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    config = ModelConfig(arch, pretrained=pretrained, init=init, **options)
    return build_backbone(config, labels, torch.Generator().manual_seed(seed), weights)


drawn_once = functools.lru_cache(maxsize=8)(drawn)


def build_torchvision(arch: str, generator: torch.Generator) -> nn.Module:
    """Torchvision's own network with 1,000 classes, drawn without moving the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        network = torchvision.models.get_model(arch, weights=None)
    assert isinstance(network, nn.Module)
    return network


def batch(n: int = 4, labels: int = 17, size: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Images, targets and crops as pfl hands them on."""
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (n, size, size, 3), np.uint8))
    targets = torch.from_numpy(rng.integers(0, 2, (n, labels), np.uint8))
    return images, targets, torch.from_numpy(draw_crops(rng, n, size, 32, "crop", "both"))


def digest(module: nn.Module) -> str:
    return hashlib.sha256(safetensors.torch.save(module.state_dict())).hexdigest()


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    """A state_dict as torchvision publishes it, BatchNorm and 1,000 classes, with telling statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        network = torchvision.models.resnet18()
    generator = torch.Generator().manual_seed(7)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    state = network.state_dict()
    assert isinstance(state, dict)
    return state


@pytest.fixture
def weights_file(published: dict[str, Tensor], tmp_path: Path) -> Path:
    path = tmp_path / "resnet18.pth"
    torch.save(published, path)
    return path


# Frozen statistics


@pytest.mark.parametrize("training", [True, False])
def test_frozen_batchnorm_is_batchnorm_in_eval_mode_with_its_gradients(training: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    live = nn.BatchNorm2d(5, eps=1e-3).eval()
    for tensor in (live.weight.data, live.bias.data, live.running_mean):
        assert tensor is not None
        tensor.normal_(generator=generator)
    assert live.running_var is not None
    live.running_var.uniform_(0.1, 3, generator=generator)
    frozen = FrozenStatisticsBatchNorm2d(5, eps=1e-3)
    frozen.load_state_dict({k: v.clone() for k, v in live.state_dict().items() if k != "num_batches_tracked"})
    frozen.train(training)
    x = torch.randn(3, 5, 4, 4, generator=generator)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    assert_close_as_vector(frozen(a), live(b), 16)
    torch.autograd.backward((frozen(a) ** 3).sum())
    torch.autograd.backward((live(b) ** 3).sum())
    for got, expected in ((a, b), (frozen.weight, live.weight), (frozen.bias, live.bias)):
        assert got.grad is not None
        assert expected.grad is not None
        assert_close_as_vector(got.grad, expected.grad, 2 * 64)  # sums of 48 cubes of the above
    assert {name for name, _ in frozen.named_parameters()} == {"weight", "bias"}


def test_a_network_with_frozen_statistics_is_torchvisions_in_eval_mode_whatever_its_eps(
    tmp_path: Path,
) -> None:
    """MobileNetV3's norms have eps 1e-3; with variances of its size, any other eps shows in the logits."""
    generator = torch.Generator().manual_seed(3)
    theirs = build_torchvision("mobilenet_v3_small", generator)
    norms = [m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {m.eps for m in norms} == {1e-3}
    for m in norms:
        assert m.running_var is not None
        m.running_var.uniform_(1e-4, 1e-3, generator=generator)
    torch.save(theirs.state_dict(), tmp_path / "mobilenet.pth")
    ours = build("mobilenet_v3_small", 1000, True, tmp_path / "mobilenet.pth")
    (_, new), (_, old) = head_of(ours), head_of(theirs)
    new.load_state_dict(old.state_dict())  # ours is always new
    x = torch.randn(3, 3, 32, 32, generator=generator)
    with torch.no_grad():
        expected, got = theirs.eval()(x).double(), ours.train()(x).double()
    # Float32 sums of up to 1,024 products err by some 32 * 2^-24 of their size, in each of 52 layers.
    assert float((got - expected).norm()) <= 52 * 2**-19 * float(expected.norm())


def test_no_running_statistic_ever_moves_and_every_parameter_does(weights_file: Path) -> None:
    model = ImageClassifier(
        build(pretrained=True, weights=weights_file), task=MultiLabel(), input_size=32
    ).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(*batch()))
        optimizer.step()
        model.metrics(*batch())
    parameters = dict(model.named_parameters())
    statistics = [name for name in before if name.endswith(("running_mean", "running_var"))]
    assert len(statistics) == 40
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in parameters), name


@pytest.mark.parametrize("pretrained", [False, True], ids=["group", "frozen_batch"])
@pytest.mark.parametrize("arch", ["resnet18", *ARCHES])
def test_every_arch_trains_in_both_norms_the_same_in_train_and_eval_mode(arch: str, pretrained: bool) -> None:
    model = ImageClassifier(build(arch, 3, pretrained), task=MultiLabel(), input_size=32).train()
    assert_no_live_batchnorm(model)
    kind = FrozenStatisticsBatchNorm2d if pretrained else nn.GroupNorm
    reference = torchvision.models.get_model(arch, weights=None)
    live = [name for name, m in reference.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert [name for name, m in model.backbone.named_modules() if isinstance(m, kind)] == live
    images, targets, crops = batch(labels=3)
    random_state = torch.get_rng_state()
    logits = model(images, crops)
    assert logits.shape == (4, 3)
    torch.autograd.backward(model.loss(images, targets, crops))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(model.eval()(images, crops), logits)
    assert torch.equal(torch.get_rng_state(), random_state), "training draws from the global generator"


def test_an_image_does_not_see_the_others_of_its_batch() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32).train()
    images, _, crops = batch()
    assert_close_as_vector(model(images, crops)[1:2], model(images[1:2], crops[1:2]), RESNET18)


def test_a_live_batchnorm_is_found() -> None:
    with pytest.raises(AssertionError, match=r"live BatchNorm at 1\.0"):
        assert_no_live_batchnorm(nn.Sequential(nn.ReLU(), nn.Sequential(nn.BatchNorm2d(3))))
    with pytest.raises(AssertionError, match="live BatchNorm"):
        ImageClassifier(nn.Sequential(nn.BatchNorm2d(3)), task=MultiLabel(), input_size=8)


def test_group_counts_are_the_largest_divisor_up_to_the_number_asked_for() -> None:
    resnet = [m for m in build().modules() if isinstance(m, nn.GroupNorm)]
    assert len(resnet) == 20
    assert {(m.num_groups, m.eps) for m in resnet} == {(32, 1e-5)}
    found = {
        m.num_channels: m.num_groups
        for m in build("mobilenet_v2", 3).modules()
        if isinstance(m, nn.GroupNorm)
    }
    assert {c: found[c] for c in (16, 24, 32, 144, 1280)} == {16: 16, 24: 24, 32: 32, 144: 24, 1280: 32}
    assert {m.num_groups for m in build(groups=5).modules() if isinstance(m, nn.GroupNorm)} == {4}


@pytest.mark.parametrize(("labels", "millions"), [(17, 11.19), (1628, 12.01)])
@pytest.mark.parametrize("pretrained", [False, True], ids=["group", "frozen_batch"])
def test_resnet18_has_the_papers_number_of_parameters(labels: int, millions: float, pretrained: bool) -> None:
    backbone = build(labels=labels, pretrained=pretrained)
    assert round(sum(p.numel() for p in backbone.parameters()) / 1e6, 2) == millions
    name, head = head_of(backbone)
    assert (name, head.bias is not None and len(head.bias)) == ("fc", labels)


# Initialisation


@pytest.mark.parametrize("init", ["keras", "torchvision"])
@pytest.mark.parametrize("arch", ["resnet18", "mobilenet_v2", "squeezenet1_1"])
def test_initialisation_is_a_function_of_its_generator_alone(arch: str, init: Init) -> None:
    random_state = torch.get_rng_state()
    first = digest(drawn(arch, init=init))
    assert torch.equal(torch.get_rng_state(), random_state), "the global generator was used"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert digest(drawn(arch, init=init)) == first
    assert digest(drawn(arch, init=init, seed=1)) != first


def test_torchvisions_initialisation_is_torchvisions() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        theirs = torchvision.models.resnet18(num_classes=17).state_dict()
    ours = build(init="torchvision", seed=3).state_dict()
    assert set(ours) == {n for n in theirs if not n.endswith(("running_mean", "running_var", "tracked"))}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_papers_initialisation_is_keras_he_normal_and_glorot_uniform() -> None:
    backbone = build(labels=1628)
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            std = math.sqrt(2 / module.weight[0].numel())
            assert module.weight.std().item() == pytest.approx(std, rel=0.03)
            assert module.weight.abs().max().item() <= 2 * std / 0.8796 * 1.0001, "cut at two deviations"
            assert module.weight.abs().max().item() > 1.9 * std / 0.8796
            assert abs(module.weight.mean().item()) < 4 * std / math.sqrt(module.weight.numel())
        elif isinstance(module, nn.Linear):
            limit = math.sqrt(6 / (512 + 1628))
            assert 0.999 * limit < module.weight.abs().max().item() <= limit
            assert module.weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.01)
            assert not module.bias.any()
        elif isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all()
            assert not module.bias.any()
    distinct = {m.weight.flatten()[0].item() for m in backbone.modules() if isinstance(m, nn.Conv2d)}
    assert len(distinct) == 20, "every layer has draws of its own"


# Weights files


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_published_weights_give_the_published_features_and_a_new_head(
    published: dict[str, Tensor], tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"w{suffix}"
    torch.save(published, path) if suffix == ".pth" else safetensors.torch.save_file(published, path)
    backbone = build(pretrained=True, weights=path)
    original = torchvision.models.get_model("resnet18", weights=None)
    original.load_state_dict(published)
    original.fc, features = nn.Identity(), copy.deepcopy(backbone).train()
    setattr(features, "fc", nn.Identity())  # noqa: B010
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert_close_as_vector(features(x), original.eval()(x), RESNET18)
    fresh = build(pretrained=True).state_dict()
    assert torch.equal(backbone.state_dict()["fc.weight"], fresh["fc.weight"]), (
        "draws do not depend on weights"
    )


@pytest.mark.parametrize("pretrained", [False, True], ids=["group", "frozen_batch"])
def test_a_saved_model_of_ours_is_a_weights_file(pretrained: bool, tmp_path: Path) -> None:
    model = ImageClassifier(build(pretrained=pretrained, seed=5), task=MultiLabel(), input_size=32)
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    loaded = build(labels=3, pretrained=pretrained, weights=tmp_path / "model.safetensors")
    for name, tensor in model.backbone.state_dict().items():
        assert name.startswith("fc.") or torch.equal(loaded.state_dict()[name], tensor), name
    kept = build(pretrained=pretrained, weights=tmp_path / "model.safetensors", keep_head=True)
    for name, tensor in model.backbone.state_dict().items():
        assert torch.equal(kept.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match=r"wrong shape or type fc.*set model\.keep_head to false"):
        build(labels=3, pretrained=pretrained, weights=tmp_path / "model.safetensors", keep_head=True)
    with pytest.raises(ValueError, match=r"model\.bottleneck makes a new head: set it to none"):
        build(pretrained=pretrained, weights=tmp_path / "model.safetensors", keep_head=True, bottleneck=4)


def broken(weights: dict[str, Tensor], fault: str) -> Any:
    changed: dict[str, Any] = dict(weights)
    if fault == "missing":
        del changed["layer1.0.bn1.running_mean"]
    elif fault == "unexpected":
        changed["layer5.weight"] = torch.zeros(3)
    elif fault == "misshaped":
        changed["conv1.weight"] = torch.zeros(64, 1, 7, 7)
    elif fault == "integers":
        changed["conv1.weight"] = torch.zeros(64, 3, 7, 7, dtype=torch.int64)
    elif fault == "wrapped":
        return {"state_dict": weights, "epoch": 3}
    elif fault == "empty":
        return {}
    elif fault == "list":
        return list(weights.values())
    return changed


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", r"does not fit resnet18: missing layer1\.0\.bn1\.running_mean"),
        ("unexpected", r"does not fit resnet18: unexpected layer5\.weight"),
        ("misshaped", r"conv1\.weight is \(64, 1, 7, 7\) torch\.float32 for \(64, 3, 7, 7\)"),
        ("integers", r"conv1\.weight is .* torch\.int64"),
        ("wrapped", "something else than tensors by name"),
        ("empty", "missing .* and 97 more"),
        ("list", "something else than tensors by name"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    published: dict[str, Tensor], tmp_path: Path, fault: str, message: str
) -> None:
    path = tmp_path / "w.pth"
    torch.save(broken(published, fault), path)
    with pytest.raises(ValueError, match=message) as refused:
        build(pretrained=True, weights=path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", ["truncated", "html", "empty"])
def test_damaged_and_foreign_files_are_refused(
    published: dict[str, Tensor], tmp_path: Path, suffix: str, content: str
) -> None:
    path = tmp_path / f"w{suffix}"
    torch.save(published, path) if suffix == ".pth" else safetensors.torch.save_file(published, path)
    data = path.read_bytes()
    path.write_bytes(
        {"truncated": data[: len(data) // 2], "html": b"<html>404</html>", "empty": b""}[content]
    )
    with pytest.raises(ValueError, match=r"cannot be read as .* damaged") as refused:
        build(pretrained=True, weights=path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


class Foreign:
    """A class that unpickling would have to run code of ours for."""


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Foreign()}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="cannot be read"):
        build(weights=tmp_path / "w.pth")


def test_weights_that_are_not_there_or_not_named_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"w\.pth does not exist"):
        build(weights=tmp_path / "w.pth")
    (tmp_path / "w.h5").touch()
    with pytest.raises(ValueError, match=r"w\.h5: must be 'imagenet' or a file named"):
        build(weights=tmp_path / "w.h5")


def test_weights_of_another_arch_are_refused(weights_file: Path) -> None:
    with pytest.raises(ValueError, match="does not fit resnet50: missing"):
        build("resnet50", pretrained=True, weights=weights_file)


def test_batchnorm_weights_are_refused_by_groupnorm(weights_file: Path) -> None:
    with pytest.raises(ValueError, match="BatchNorm statistics, for which GroupNorm has no place"):
        build(weights=weights_file)


@pytest.mark.parametrize("failure", [URLError("no route to host"), RuntimeError("invalid hash value")])
def test_without_a_network_the_file_to_fetch_is_named(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("pfl_ext.models.download._ask", lambda _: None)
    monkeypatch.setattr("torch.hub.download_url_to_file", fail)
    with pytest.raises(ValueError, match=r"resnet18-f37072fd\.pth .* --weights FILE"):
        build(pretrained=True, weights="imagenet")


def test_the_downloaded_weights_are_the_pinned_ones(
    published: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torchvision's own way, with the transfer alone replaced."""
    asked: list[tuple[str, str | None]] = []

    def transfer(url: str, target: str, prefix: str | None = None) -> None:
        asked.append((url, prefix))
        torch.save(published, target)

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("pfl_ext.models.download._ask", lambda _: None)
    monkeypatch.setattr("torch.hub.download_url_to_file", transfer)
    backbone = build(pretrained=True, weights="imagenet")
    assert asked == [("https://download.pytorch.org/models/resnet18-f37072fd.pth", "f37072fd")]
    assert torch.equal(backbone.state_dict()["bn1.running_var"], published["bn1.running_var"])


def test_an_arch_without_published_weights_of_that_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no IMAGENET1K_V1 weights for vit_h_14"):
        read_weights("vit_h_14", "imagenet")


# The classifier


def test_loss_is_binary_cross_entropy_meaned_over_images_and_labels() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    images, targets, crops = batch()
    p = torch.sigmoid(model(images, crops).double())
    expected = -(targets * p.log() + (1 - targets.double()) * (1 - p).log()).mean()
    assert model.loss(images, targets, crops).item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.loss(images, targets, crops).requires_grad


def test_metrics_add_up_over_batches_of_any_size() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    images, targets, _ = batch(5)
    whole = model.metrics(images, targets)["loss"]
    parts = model.metrics(images[:2], targets[:2])["loss"] + model.metrics(images[2:], targets[2:])["loss"]
    assert whole.weight == parts.weight == 5
    for same in (parts.overall_value, model.loss(images, targets).item()):
        assert whole.overall_value == pytest.approx(same, rel=RESNET18 * 2.0**-24)


def test_without_crops_the_whole_image_is_seen_and_with_them_a_part() -> None:
    model = ImageClassifier(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2)),
        task=MultiLabel(),
        input_size=32,
        mean=(0, 0, 0),
    )
    images, targets, crops = batch()
    whole = F.interpolate(images.permute(0, 3, 1, 2) / 255, (32, 32), mode="bilinear", antialias=True)
    std = torch.tensor((0.229, 0.224, 0.225))[:, None, None]
    assert_close_as_vector(model(images), model.backbone(whole / std), 2 * 56 + 8)  # sums of 3,072 terms
    top, left = int(crops[0, 0]), int(crops[0, 1])
    cut = images[0, top : top + 32, left : left + 32].permute(2, 0, 1) / 255
    cut = cut.flip([axis for axis, flag in ((2, crops[0, 4]), (1, crops[0, 5])) if flag])
    assert_close_as_vector(model.prepare(images, targets, crops)[0][0], cut / std, 4)


def test_the_saved_state_holds_the_network_and_nothing_else() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    assert set(model.state_dict()) == {f"backbone.{name}" for name in model.backbone.state_dict()}


def test_channels_last_changes_nothing_but_the_memory() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    expected = model(*batch()[::2])
    assert model.prepare(*batch())[0].is_contiguous()
    last = model.to(memory_format=torch.channels_last)
    assert_close_as_vector(last(*batch()[::2]), expected, RESNET18)
    assert last.prepare(*batch())[0].is_contiguous(memory_format=torch.channels_last)


def test_pfl_trains_the_classifier_by_its_own_bridge() -> None:
    from pfl.data.dataset import Dataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.bridge.pytorch.sgd import PyTorchSGDBridge
    from pfl.model.pytorch import PyTorchModel

    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    reference = copy.deepcopy(model)
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    parameters = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=4)
    PyTorchSGDBridge.do_sgd(wrapped, Dataset(raw_data=list(batch(4))), parameters)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    torch.autograd.backward(reference.loss(*batch(4)))
    optimizer.step()
    assert_close_as_vector(list(model.parameters()), list(reference.parameters()), RESNET18)
    metrics = wrapped.evaluate(Dataset(raw_data=list(batch(4)[:2])))
    assert "loss" in str(metrics)


def test_the_probe_tells_models_apart_and_repeats_itself() -> None:
    def checksum(seed: int = 0, **changes: Any) -> str:
        return probe_checksum(ImageClassifier(build(seed=seed), task=MultiLabel(), input_size=32, **changes))

    assert checksum() == checksum()
    assert len({checksum(), checksum(seed=1), checksum(mean=(0.5, 0.5, 0.5))}) == 3
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    assert probe_checksum(model) == probe_checksum(model.train()) == checksum()


# Mistakes


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_mistakes_in_names_are_named() -> None:
    with pytest.raises(ValueError, match=r"no classifier 'resnet81'; did you mean resnet18\?"):
        build("resnet81")
    with pytest.raises(ValueError, match="inception_v3 has auxiliary outputs"):
        build("inception_v3")
    with pytest.raises(ValueError, match="num_labels is 0"):
        build(labels=0)


@pytest.mark.parametrize(
    ("arch", "side"), [("alexnet", 32), ("vit_b_32", 33), ("squeezenet1_0", 8)], ids=lambda value: str(value)
)
def test_images_that_a_network_cannot_take_are_refused(arch: str, side: int) -> None:
    with pytest.raises(
        ValueError, match=rf"{arch} cannot take images of {side} x {side} pixels \(.*\): choose"
    ):
        build(arch, input_size=side)


def test_a_vision_transformer_is_made_for_the_size_of_its_images() -> None:
    assert build("vit_b_32", input_size=64)(torch.zeros(2, 3, 64, 64)).shape == (2, 17)
