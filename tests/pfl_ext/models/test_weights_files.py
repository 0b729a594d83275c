"""Files of pretrained weights: what they give, and which are refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.error import URLError

import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.small import NETWORKS
from pfl_ext.models.trained import part_of_classes
from pfl_ext.models.weights import drawn_in, load_weights, read_weights
from pfl_ext.tasks.multi_label import MultiLabel
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.models.test_models import RESNET18, build, drawn

SMALLEST = "shufflenet_v2_x0_5"
"""A twentieth of ResNet-18's parameters; its last layer is ``fc``, too."""
pytestmark = pytest.mark.xdist_group("models")
"""One process runs them all: `drawn_once` remembers networks."""


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


def test_what_a_training_script_saved_beside_its_optimiser_is_a_weights_file(tmp_path: Path) -> None:
    published = torchvision.models.get_model(SMALLEST, weights=None).state_dict()
    torch.save(published, tmp_path / "plain.pth")
    plain = build(SMALLEST, pretrained=True, weights=tmp_path / "plain.pth").state_dict()
    parallel = {f"module.{name}": tensor for name, tensor in published.items()}
    for wrapper in ("state_dict", "model"):
        torch.save({"epoch": 3, "optimizer": {"state": {}}, wrapper: parallel}, tmp_path / "saved.pt")
        saved = build(SMALLEST, pretrained=True, weights=tmp_path / "saved.pt").state_dict()
        assert all(torch.equal(saved[name], tensor) for name, tensor in plain.items())


def test_a_network_whose_own_names_begin_so_keeps_them() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    network = Wrapped()
    tensors = {name: tensor + 1 for name, tensor in network.state_dict().items()}
    load_weights(network, None, "wrapped", tensors, "w.pth")
    assert torch.equal(network.module.weight, tensors["module.weight"])


@pytest.mark.parametrize("value", [float("nan"), 1e300], ids=["nan", "beyond float32"])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    network = nn.Linear(2, 2)
    tensors = {name: tensor.double() for name, tensor in network.state_dict().items()}
    tensors["weight"][0, 1] = value
    with pytest.raises(ValueError, match=r"^w\.pth holds numbers that are not finite .*, in weight: give"):
        load_weights(network, None, "linear", tensors, "w.pth")


@pytest.mark.parametrize("pretrained", [False, True], ids=["group", "frozen_batch"])
def test_a_saved_model_of_ours_is_a_weights_file(pretrained: bool, tmp_path: Path) -> None:
    build = partial(drawn, SMALLEST, pretrained=pretrained)
    model = ImageClassifier(build(seed=5), task=MultiLabel(), input_size=32)
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    loaded = build(labels=3, weights=tmp_path / "model.safetensors")
    for name, tensor in model.backbone.state_dict().items():
        assert name.startswith("fc.") or torch.equal(loaded.state_dict()[name], tensor), name
    kept = build(weights=tmp_path / "model.safetensors", keep_head=True)
    for name, tensor in model.backbone.state_dict().items():
        assert torch.equal(kept.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match=r"wrong shape or type fc.*set model\.keep_head to false"):
        build(labels=3, weights=tmp_path / "model.safetensors", keep_head=True)
    with pytest.raises(ValueError, match=r"model\.bottleneck makes a new head: set it to none"):
        build(weights=tmp_path / "model.safetensors", keep_head=True, bottleneck=4)


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
        return {"encoder": weights, "epoch": 3}
    elif fault == "empty":
        return {}
    elif fault == "numbered":
        return dict(enumerate(weights.values()))
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
        ("wrapped", "is not a mapping of names to tensors; save a state_dict"),
        ("empty", "missing .* and 97 more"),
        ("numbered", "is not a mapping of names to tensors; save a state_dict"),
        ("list", "is not a mapping of names to tensors; save a state_dict"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    published: dict[str, Tensor], tmp_path: Path, fault: str, message: str
) -> None:
    path, network = tmp_path / "w.pth", build(pretrained=True)
    torch.save(broken(published, fault), path)
    with pytest.raises(ValueError, match=message) as refused:
        load_weights(network, part_of_classes(network), "resnet18", *read_weights("resnet18", path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", ["truncated", "html", "empty"])
def test_damaged_and_foreign_files_are_refused(
    published: dict[str, Tensor], tmp_path: Path, suffix: str, content: str
) -> None:
    path = tmp_path / f"w{suffix}"
    layer = {"conv1.weight": published["conv1.weight"]}
    torch.save(layer, path) if suffix == ".pth" else safetensors.torch.save_file(layer, path)
    data = path.read_bytes()
    path.write_bytes(
        {"truncated": data[: len(data) // 2], "html": b"<html>404</html>", "empty": b""}[content]
    )
    with pytest.raises(ValueError, match=r"cannot be read as .* damaged") as refused:
        read_weights("resnet18", path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


class Foreign:
    """A class that unpickling would have to run code of ours for."""


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Foreign()}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="cannot be read"):
        build(SMALLEST, weights=tmp_path / "w.pth")


def test_weights_that_are_not_there_or_not_named_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"w\.pth does not exist"):
        build(SMALLEST, weights=tmp_path / "w.pth")
    (tmp_path / "w.h5").touch()
    with pytest.raises(ValueError, match=r"w\.h5: must be 'imagenet' or a file named"):
        build(SMALLEST, weights=tmp_path / "w.h5")


def test_weights_of_another_arch_are_refused(weights_file: Path) -> None:
    with pytest.raises(ValueError, match=f"does not fit {SMALLEST}: missing"):
        build(SMALLEST, pretrained=True, weights=weights_file)


class Small(nn.Module):
    """A convolution with BatchNorm, and the last layer."""

    def __init__(self, num_labels: int, with_adapter: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.adapter = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) if with_adapter else None
        self.fc = nn.Linear(4, num_labels)

    def forward(self, x: Tensor) -> Tensor:
        adapted = x if self.adapter is None else x + self.adapter(x)
        return cast(Tensor, self.fc(self.body(adapted).mean((2, 3))))


@pytest.fixture
def with_adapter(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a network with a layer that its weights do not have."""

    def with_adapter(num_labels: int, input_size: int) -> nn.Module:
        return Small(num_labels, True)

    vars(with_adapter).update(new=("adapter",))
    NETWORKS.names()
    monkeypatch.setattr(NETWORKS, "_things", dict(NETWORKS._things))
    NETWORKS.register("with_adapter")(with_adapter)
    return "with_adapter"


def test_what_weights_do_not_have_of_a_network_stays_as_it_was_drawn(
    with_adapter: str, tmp_path: Path
) -> None:
    known = Small(17, False).state_dict()
    torch.save(known, tmp_path / "known.pth")
    network, fresh = (drawn(with_adapter, 17, True, w) for w in (tmp_path / "known.pth", None))
    state, before = network.state_dict(), fresh.state_dict()
    new = [name for name in state if name.startswith("adapter.")]
    assert drawn_in(network) == sorted(new)
    assert len(new) == 6
    assert drawn_in(fresh) == []
    for name, tensor in state.items():
        source = before if name in new or name.startswith("fc.") else known
        assert torch.equal(tensor, source[name]), name
    torch.save(state, tmp_path / "own.pth")
    again = drawn(with_adapter, 17, True, tmp_path / "own.pth", keep_head=True)
    assert drawn_in(again) == [], "its own file has everything"
    del state[new[0]]
    torch.save(state, tmp_path / "part.pth")
    with pytest.raises(ValueError, match=rf"does not fit with_adapter: missing {new[0]};"):
        drawn(with_adapter, 17, True, tmp_path / "part.pth")


@pytest.mark.parametrize("trained", ["head", "lora", "bias"])
def test_a_part_that_leaves_out_new_parameters_is_refused(with_adapter: str, trained: str) -> None:
    with pytest.raises(ValueError, match=r"with_adapter has new parameters \(adapter\)"):
        drawn(with_adapter, 17, True, None, trained=trained)
    names = drawn(with_adapter, 17, True, None, trained="names", trained_names="adapter,fc")
    trainable = {name.partition(".")[0] for name, p in names.named_parameters() if p.requires_grad}
    assert trainable == {"adapter", "fc"}


def test_a_name_declared_as_new_must_be_there(with_adapter: str) -> None:
    vars(NETWORKS[with_adapter])["new"] = ("adapter", "prompts")
    with pytest.raises(ValueError, match="with_adapter declares prompts as new, but no parameter has this"):
        drawn(with_adapter, 17, False, None)


def test_batchnorm_weights_are_refused_by_groupnorm(weights_file: Path) -> None:
    with pytest.raises(ValueError, match="BatchNorm statistics, for which GroupNorm has no place"):
        build(weights=weights_file)


def test_weights_of_a_network_from_scratch_are_refused_by_frozen_batchnorm(tmp_path: Path) -> None:
    """It was said to be no file of this network. The remedy that is named is one."""
    build = partial(drawn, SMALLEST)
    first = build(seed=3)
    safetensors.torch.save_file(first.state_dict(), file := tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"trained from scratch, with GroupNorm: set model.norm to group"):
        build(pretrained=True, keep_head=True, weights=file)
    second = build(pretrained=True, norm="group", keep_head=True, weights=file)
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(second(x), first(x))


def test_batchnorm_weights_are_refused_where_groupnorm_is_asked_for(weights_file: Path) -> None:
    with pytest.raises(ValueError, match=r"GroupNorm has no place: set model\.norm to auto"):
        build(pretrained=True, norm="group", weights=weights_file)


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
