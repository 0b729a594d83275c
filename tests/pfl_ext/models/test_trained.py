"""What of a network is trained: its last blocks, LoRA's adapters, its biases or its norms."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torchvision.models as zoo
from torch import Tensor, nn

from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.lora import adapter_tensors, adapters_in_words, adapters_of, load_merged, merged
from pfl_ext.models.lora_layers import LowRank
from pfl_ext.models.trained import blocks_of, choose_trained, head_of
from pfl_ext.tasks.single_label import SingleLabel
from tests.closeness import assert_close_as_vector

LABELS, SIDE = 5, 32


def build(arch: str, seed: int = 0, weights: Path | None = None, **options: Any) -> nn.Module:
    config = ModelConfig(arch, **{"input_size": SIDE, "groups": 4, **options})
    return build_backbone(config, LABELS, torch.Generator().manual_seed(seed), weights)


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def trained(network: nn.Module) -> list[str]:
    return [name for name, p in network.named_parameters() if p.requires_grad]


@torch.no_grad()
def trained_for_a_while(network: nn.Module, seed: int = 3) -> nn.Module:
    """The network with other values of what is trained."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.03)
    return network


@pytest.mark.parametrize(
    "arch, number, last",
    [
        ("resnet18", 9, ["layer4.1"]),
        ("resnet50", 17, ["layer4.2"]),
        ("efficientnet_b0", 18, ["features.8"]),
        ("mobilenet_v3_small", 14, ["classifier.0"]),
        ("convnext_tiny", 22, ["features.7.2", "classifier.0"]),
        ("regnet_y_400mf", 17, ["trunk_output.block4.block4-5"]),
        ("shufflenet_v2_x0_5", 18, ["conv5.0", "conv5.1"]),
        ("squeezenet1_1", 9, ["features.12"]),
        ("efficientnet_lite0", 18, ["last"]),
        ("lenet", 4, ["fc2"]),
        ("vgg9", 8, ["20"]),
    ],
)
def test_a_block_is_what_a_network_repeats(arch: str, number: int, last: list[str]) -> None:
    net = build(arch, trained="last_blocks")
    head = head_of(net)[0]
    blocks = blocks_of(net, head)
    assert len(blocks) == number
    assert blocks[-1] == last
    expected = [n for n, _ in net.named_parameters() if n.startswith(tuple(f"{m}." for m in (*last, head)))]
    assert trained(net) == expected


def test_a_block_of_a_transformer_is_an_encoder_block() -> None:
    blocks = blocks_of(transformer(), "heads.head")
    layers = [f"encoder.layers.encoder_layer_{place}" for place in range(2)]
    assert blocks == [["conv_proj"], [layers[0]], [layers[1], "encoder.ln"]]


def test_as_many_blocks_are_trained_as_are_asked_for() -> None:
    net = build("resnet18", trained="last_blocks", last_blocks=3)
    assert {name.rpartition("layer")[2][:3] for name in trained(net) if "layer" in name} == {
        "3.1",
        "4.0",
        "4.1",
    }
    assert trained(net)[-2:] == ["fc.weight", "fc.bias"]


def test_biases_or_norms_are_trained_and_the_head() -> None:
    net = build("resnet18", trained="bias")
    assert all(name == "fc.weight" or name.endswith("bias") for name in trained(net))
    assert len(trained(net)) == 22  # 20 norms
    net = build("resnet18", trained="norms", pretrained=True)
    norms = [name for name, layer in net.named_modules() if "Norm" in type(layer).__name__]
    assert trained(net)[:-2] == [f"{name}.{part}" for name in norms for part in ("weight", "bias")]


@pytest.mark.parametrize("kind", ["last_blocks", "lora", "bias"])
def test_a_bottleneck_is_trained_with_the_head(kind: str) -> None:
    net = build("mobilenet_v2", trained=kind, bottleneck=8)
    behind = [f"classifier.1.{place}.{part}" for place in (0, 1) for part in ("weight", "bias")]
    assert trained(net)[-4:] == behind
    assert isinstance(net.get_submodule("classifier.1.0"), nn.Linear)


def transformer() -> nn.Module:
    """A small one of torchvision's, whose attention reads the weights of its last projection itself."""
    torch.manual_seed(0)
    net: nn.Module = zoo.VisionTransformer(SIDE, 8, 2, 2, hidden_dim=16, mlp_dim=32, num_classes=LABELS)
    return net


def pair(arch: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain network, and the same with adapters."""
    if arch != "transformer":
        return build(arch), build(arch, trained="lora", **options)
    plain, net = transformer(), transformer()
    config = ModelConfig("transformer", input_size=SIDE, trained="lora", **options)
    choose_trained(net, config, torch.Generator().manual_seed(1))
    return plain, net


ADAPTED = ("resnet18", "efficientnet_lite0", "transformer", "lenet")


@pytest.mark.parametrize("arch", ADAPTED)
def test_adapters_change_no_output_at_the_start_and_are_all_that_is_trained(arch: str) -> None:
    plain, net = pair(arch)
    assert torch.equal(net(images()), plain(images()))
    head = head_of(net)[0]
    assert set(trained(net)) == {*adapter_tensors(net), f"{head}.weight", f"{head}.bias"}
    for name, layer in plain.named_modules():
        if name != head and isinstance(layer, nn.Linear | nn.Conv2d):
            expected = getattr(layer, "groups", 1) == 1 and "out_proj" not in name
            assert (name in adapters_of(net)) == expected, name


@pytest.mark.parametrize("arch", ADAPTED)
def test_the_merged_network_gives_the_same_outputs_under_the_plain_networks_names(arch: str) -> None:
    """In float64: twenty layers magnify its rounding by some powers of ten, of sixteen."""
    plain, net = (each.double() for each in pair(arch, lora_alpha=20.0))
    trained_for_a_while(net)
    whole = merged(net)
    assert adapters_of(net), "the network itself goes on"
    assert not adapters_of(whole)
    assert whole.state_dict().keys() == plain.state_dict().keys()
    x = images().double()
    outputs = net(x).detach()
    assert_close_as_vector(whole(x), outputs, roundings=1e6)
    with torch.no_grad():
        for layer in adapters_of(net).values():
            layer.lora_b.weight.zero_()
        without = net(x)
    assert float((without - outputs).norm() / outputs.norm()) > 1e-2, "the adapters had a part in it"


def test_a_saved_merged_network_is_a_start_for_the_plain_one(tmp_path: Path) -> None:
    whole = merged(trained_for_a_while(build("lenet", trained="lora")))
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({f"backbone.{n}": t for n, t in whole.state_dict().items()}, path)
    loaded = build("lenet", seed=8, weights=path, pretrained=True, keep_head=True)
    assert torch.equal(loaded(images()), whole(images()))


def test_a_merged_network_and_its_adapters_go_on_where_training_ended() -> None:
    net = ImageClassifier(
        trained_for_a_while(build("lenet", trained="lora")), task=SingleLabel(), input_size=SIDE
    )
    again = ImageClassifier(build("lenet", seed=7, trained="lora"), task=SingleLabel(), input_size=SIDE)
    load_merged(again, merged(net).state_dict(), adapter_tensors(net))
    ours, theirs = (dict(each.named_parameters()) for each in (again, net))
    assert_close_as_vector(ours, {n: p.detach() for n, p in theirs.items()}, roundings=4)
    assert all(torch.equal(ours[name], theirs[name]) for name in adapter_tensors(net))
    plain = ImageClassifier(build("lenet", seed=7), task=SingleLabel(), input_size=SIDE)
    load_merged(plain, merged(net).state_dict(), {})
    assert torch.equal(plain.backbone(images()), merged(net).backbone(images()))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 3),
        nn.Conv2d(4, 3, 3, stride=2, padding=1),
        nn.Conv2d(4, 3, (3, 1), padding="same", dilation=2, padding_mode="reflect"),
    ],
    ids=str,
)
def test_an_adapter_of_full_rank_can_be_any_update(layer: nn.Linear | nn.Conv2d) -> None:
    """A^-1 exists for a square A, and B = update A^-1 alpha^-1 rank."""
    draw = torch.Generator().manual_seed(2)
    update = torch.randn(layer.weight.shape, generator=draw, dtype=torch.float64)
    rank = layer.weight[0].numel()
    config = ModelConfig(lora_rank=rank, lora_alpha=2.0)
    adapted = LowRank(copy.deepcopy(layer), config, torch.Generator().manual_seed(3)).double()
    a = adapted.lora_a.weight.detach().flatten(1)
    with torch.no_grad():
        b = torch.linalg.solve(a.T, update.flatten(1).T).T / adapted.scale
        adapted.lora_b.weight.copy_(b.view(adapted.lora_b.weight.shape))
    roundings = 10 * rank * float(torch.linalg.cond(a))
    assert_close_as_vector(adapted.added(), update, roundings)
    updated = copy.deepcopy(layer).double()
    with torch.no_grad():
        updated.weight.add_(update)
    shape = (2, 4) if isinstance(layer, nn.Linear) else (2, 4, 7, 7)
    x = torch.randn(shape, generator=draw, dtype=torch.float64)
    assert_close_as_vector(adapted(x).detach(), updated(x).detach(), roundings)


def test_what_lora_draws_is_a_function_of_its_generator_and_not_of_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = build("lenet", trained="lora", seed=3)
    torch.manual_seed(2)
    again, other = (build("lenet", trained="lora", seed=seed) for seed in (3, 4))
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(build("lenet", seed=9).state_dict(), path)
    loaded = build("lenet", trained="lora", seed=3, weights=path, pretrained=True)
    ones, others = adapter_tensors(one), adapter_tensors(other)
    assert all(torch.equal(t, adapter_tensors(again)[name]) for name, t in ones.items())
    assert all(torch.equal(t, adapter_tensors(loaded)[name]) for name, t in ones.items())
    assert torch.equal(one.get_parameter("fc3.weight"), loaded.get_parameter("fc3.weight"))
    drawn = [(t, others[name]) for name, t in ones.items() if "lora_a" in name]
    assert not any(torch.equal(*pair) for pair in drawn)
    for a, _ in drawn:
        bound = a[0].numel() ** -0.5
        assert 0.9 * bound < float(a.detach().abs().max()) <= bound


def test_with_a_fixed_the_mean_of_products_is_the_product_of_means() -> None:
    """FFA-LoRA's argument (Sun et al. 2024), of two users that have trained for a while."""
    names = [n for n, _ in build("lenet", trained="lora").named_parameters() if "lora_" in n]
    apart = {}
    for kind in ("both", "b"):
        start = build("lenet", trained="lora", lora_trained=kind)
        assert [n for n in trained(start) if "lora_" in n] == [
            n for n in names if kind == "both" or "_b" in n
        ]
        users = [trained_for_a_while(copy.deepcopy(start), seed=seed) for seed in (3, 4)]
        mean = copy.deepcopy(start)
        with torch.no_grad():
            for name, p in mean.named_parameters():
                p.copy_(torch.stack([user.get_parameter(name).double() for user in users]).mean(0))
        added = [[layer.added() for layer in adapters_of(user).values()] for user in users]
        products = [torch.stack(of_layer).mean(0) for of_layer in zip(*added)]
        found = [layer.added() for layer in adapters_of(mean).values()]
        off = [float((f - p).norm() / p.norm()) for f, p in zip(found, products)]
        apart[kind] = max(off)
    assert apart["b"] < 4 * 2**-24 < 0.1 < apart["both"]


def test_a_line_says_which_weights_have_no_adapter() -> None:
    assert adapters_in_words(build("lenet")) is None
    assert (
        adapters_in_words(build("lenet", trained="lora"))
        == "LoRA of rank 8 on 4 layers, which are all but the last"
    )
    plain, net = pair("transformer", lora_rank=2, lora_targets="called")
    whole = sum(p.numel() for p in plain.parameters())
    bare = sum(
        p.numel() for n, p in plain.named_parameters() if "in_proj_weight" in n or "out_proj.weight" in n
    )
    bare += plain.get_parameter("class_token").numel() + plain.get_parameter("encoder.pos_embedding").numel()
    share = f"{100 * bare / whole:.0f} %"
    largest = "encoder.layers.encoder_layer_0.self_attention.in_proj_weight"
    expected = (
        f"on 5 layers; 6 frozen weights have none ({share} of the parameters), the largest is {largest}"
    )
    assert adapters_in_words(net) == f"LoRA of rank 2 {expected}"


def test_names_choose_what_is_trained_and_nothing_else() -> None:
    def chosen(names: str, arch: str = "lenet") -> list[str]:
        return trained(build(arch, trained="names", trained_names=names))

    assert chosen("fc1") == ["fc1.weight", "fc1.bias"]
    assert chosen(" fc1.bias , conv2 ") == ["conv2.weight", "conv2.bias", "fc1.bias"]
    assert chosen("conv*.weight,conv1") == ["conv1.weight", "conv1.bias", "conv2.weight"]
    assert chosen("2", "vgg9") == ["2.weight", "2.bias"], "and not 20"
    assert ModelConfig(trained_names="a, b ,a").trained_names == "a,b"
    for names, message in (
        ("fc1,fc", r"trained_names has fc, but no parameter .*: choose other names, like fc"),
        ("fc1,*.scale", r"has \*\.scale, but"),
        ("fc1,,fc2", "with an empty name"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen(names)
    with pytest.raises(ValueError, match=r"trained is names, but model\.trained_names is none: set"):
        ModelConfig(trained="names")


class TwoPaths(nn.Module):
    """Whose blocks are not run in the order in which it has them, or twice."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.second, self.first = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.head = nn.Linear(3, LABELS)
        self._again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.second(x)) if self._again else self.second(self.first(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


DEPTHWISE = nn.Sequential(
    nn.Conv2d(3, 3, 3, groups=3, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)
)


@pytest.mark.parametrize(
    "network, options, message",
    [
        (DEPTHWISE, {"trained": "lora"}, "no linear layer, and no convolution without groups, before its"),
        (DEPTHWISE, {"trained": "bias"}, "has no bias before its last layer: set model.trained to all or"),
        (DEPTHWISE, {"trained": "norms"}, "has no norm with a scale before its last layer: set"),
        (DEPTHWISE, {"trained": "last_blocks"}, "has only one block .*: set model.trained to all$"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3072, 2)), {"trained": "lora"}, "has no linear layer"),
        ("lenet", {"trained": "lora", "lora_rank": 121}, "the largest rank of a layer of lenet is 120"),
        ("lenet", {"trained": "last_blocks", "last_blocks": 4}, "has 4 blocks .*: choose at most 3, or set"),
        ("lenet", {"trained": "norms"}, "but lenet has no norm with a scale before"),
        (TwoPaths(False), {"trained": "last_blocks"}, "are not run one after another, each once: set"),
        (TwoPaths(True), {"trained": "last_blocks"}, "are not run one after another, each once: set"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_what_a_network_has_not_is_refused_in_one_line(
    network: nn.Module | str, options: dict[str, Any], message: str
) -> None:
    config = ModelConfig("mine" if isinstance(network, nn.Module) else network, input_size=SIDE, **options)
    net = network if isinstance(network, nn.Module) else build(network)
    with pytest.raises(ValueError, match=message) as caught:
        choose_trained(net, config, torch.Generator())
    assert "\n" not in str(caught.value)
