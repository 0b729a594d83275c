"""Adapters of attention are those of three linear layers and one, and which layers get adapters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchvision.models as zoo
from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformerBlock, SwinTransformerBlockV2

from pfl_ext.models.config import ModelConfig
from pfl_ext.models.lora import adapter_tensors, adapters_in_words, adapters_of, load_merged, merged
from pfl_ext.models.lora_layers import PARTS, LowRankAttention, adapt
from pfl_ext.models.trained import choose_trained
from tests.closeness import assert_close_as_vector

LABELS, SIDE, WIDTH, HEADS = 5, 16, 12, 3
ROUNDINGS = 1e4


def vit() -> nn.Module:
    net: nn.Module = zoo.VisionTransformer(SIDE, 8, 2, HEADS, WIDTH, 2 * WIDTH, num_classes=LABELS)
    return net


def swin(version: int = 1) -> nn.Module:
    block = SwinTransformerBlock if version == 1 else SwinTransformerBlockV2
    net: nn.Module = zoo.SwinTransformer(
        [2, 2], WIDTH, [2], [HEADS], [2, 2], stochastic_depth_prob=0.0, num_classes=LABELS, block=block
    )
    return net


class WithWeights(nn.Module):
    """A network of one's own, whose attention returns weights, has no bias and takes positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 8, 8)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, kdim=WIDTH, vdim=WIDTH)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).permute(2, 0, 1)
        mixed, _ = self.attention(tokens, tokens, tokens)
        out: Tensor = self.head(mixed.mean(0))
        return out


class Layers(nn.Module):
    """torch's own encoder layers, which in evaluation read the weights of their attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 8, 8)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(x).flatten(2).transpose(1, 2)).mean(1))
        return out


NETWORKS = {"vit": vit, "swin": swin, "swin_v2": lambda: swin(2), "weights": WithWeights, "layers": Layers}


def pair(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain network, and the same with adapters, in float64."""
    torch.manual_seed(0)
    plain = NETWORKS[name]().double()
    net = copy.deepcopy(plain).float()
    config = ModelConfig(name, input_size=SIDE, trained="lora", lora_rank=3, **options)
    choose_trained(net, config, torch.Generator().manual_seed(1))
    return plain, net.double()


def images() -> Tensor:
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
def trained_for_a_while(net: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype), alpha=0.1)
    return net


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_of_a_transformer_has_an_adapter_that_acts_in_training_and_evaluation(name: str) -> None:
    plain, net = pair(name)
    x = images()
    assert_close_as_vector(net(x).detach(), plain(x).detach(), ROUNDINGS)
    tables = ("class_token", "pos_embedding", "relative_position_bias_table", "logit_scale")
    words = adapters_in_words(net) or ""
    assert "all but the last" in words or words.endswith(tables)
    trained_for_a_while(net)
    outputs = net(x)
    names = list(adapter_tensors(net))
    gradients = torch.autograd.grad(outputs.square().sum(), [net.get_parameter(n) for n in names])
    assert all(bool(gradient.any()) for gradient in gradients)
    whole = merged(net)
    assert whole.state_dict().keys() == plain.state_dict().keys()
    assert not [m for m in whole.modules() if isinstance(m, LowRankAttention)]
    outputs = outputs.detach()
    assert float((outputs - plain(x).detach()).norm()) > 1e-2 * float(outputs.norm())
    assert_close_as_vector(whole(x).detach(), outputs, ROUNDINGS)
    with torch.no_grad():  # where torch's layers have a fast path that reads the weights
        assert_close_as_vector(net.eval()(x), outputs, ROUNDINGS)
        assert_close_as_vector(whole.eval()(x), outputs, ROUNDINGS)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_merged_transformer_and_its_adapters_go_on_where_training_ended(name: str) -> None:
    net = trained_for_a_while(pair(name)[1])
    again = trained_for_a_while(pair(name)[1])
    load_merged(again, merged(net).state_dict(), adapter_tensors(net))
    ours, theirs = (dict(each.named_parameters()) for each in (again, net))
    assert_close_as_vector(ours, {n: p.detach() for n, p in theirs.items()}, 4)


class Linears(nn.Module):
    """Attention written out: four linear layers, each with A and B beside it."""

    def __init__(self, of: LowRankAttention) -> None:
        super().__init__()
        self.bases, self.a, self.b = nn.ModuleList(), nn.ParameterList(), nn.ParameterList()
        biases = of.in_proj_bias.detach().chunk(3)
        for part, bias in zip(PARTS, (*biases, of.out_proj.bias.detach())):
            weight = of.weight_of(part).detach()
            base = nn.Linear(weight.shape[1], weight.shape[0]).double().requires_grad_(False)
            base.load_state_dict({"weight": weight, "bias": bias})
            self.bases.append(base)
            self.a.append(of.parts()[part].lora_a.weight.detach().clone())
            self.b.append(of.parts()[part].lora_b.weight.detach().clone())
        self.scale = of.parts()["query"].scale

    def _part(self, place: int, x: Tensor) -> Tensor:
        out: Tensor = self.bases[place](x) + self.scale * x @ self.a[place].T @ self.b[place].T
        return out

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            self._part(place, x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for place, x in enumerate((query, key, value))
        )
        shares = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        return self._part(3, (shares @ v).transpose(1, 2).flatten(2))


def adapted(**options: Any) -> LowRankAttention:
    torch.manual_seed(2)
    attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})
    if attention.out_proj.bias is not None:
        nn.init.normal_(attention.out_proj.bias)
    attention.requires_grad_(False)
    for part in PARTS:
        adapt(attention, part, ModelConfig(lora_rank=2, lora_alpha=6.0), torch.Generator().manual_seed(4))
    assert isinstance(attention, LowRankAttention)
    trained_for_a_while(attention)
    attention.double()
    return attention


def inputs(attention: nn.MultiheadAttention) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    widths = (WIDTH, attention.kdim, attention.vdim)
    lengths = (4, 7, 7)
    return [torch.randn(2, n, w, generator=draw, dtype=torch.float64) for n, w in zip(lengths, widths)]


@pytest.mark.parametrize("other", [{}, {"kdim": 8, "vdim": 10}], ids=["packed", "apart"])
@pytest.mark.parametrize("weights", [False, True], ids=["called", "read"])
def test_steps_on_attention_are_those_on_four_linear_layers_written_out(
    other: dict[str, int], weights: bool
) -> None:
    ours = adapted(**other)
    theirs = Linears(ours)
    given = inputs(ours)
    steps = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.1)
    others = torch.optim.SGD([*theirs.a, *theirs.b], lr=0.1)
    for _ in range(3):
        outputs = ours(*given, need_weights=weights)[0]
        expected = theirs(*given)
        assert_close_as_vector(outputs.detach(), expected.detach(), ROUNDINGS)
        for optimizer, out in ((steps, outputs), (others, expected)):
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
    parts = ours.parts().values()
    found = [p.lora_a.weight.detach() for p in parts] + [p.lora_b.weight.detach() for p in parts]
    pairs = zip(found, [p.detach() for p in (*theirs.a, *theirs.b)])
    for mine, written in pairs:
        assert_close_as_vector(mine, written, ROUNDINGS)


def calls() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Options of attention, and of a call."""
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    mask = torch.ones(4, 7, dtype=torch.bool).triu(1)
    forms: tuple[dict[str, Any], ...] = (
        {},
        {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"kdim": 8, "vdim": 10},
    )
    uses: tuple[dict[str, Any], ...] = (
        {},
        {"need_weights": False},
        {"key_padding_mask": padding, "average_attn_weights": False},
        {"attn_mask": mask, "need_weights": False},
        {"attn_mask": mask, "need_weights": False, "is_causal": True},
    )
    return itertools.product(forms, uses)


def test_attention_with_adapters_is_called_like_torchs_and_gives_what_the_merged_one_gives() -> None:
    for (form, use), first in zip(calls(), itertools.cycle([True, False])):
        net = nn.ModuleDict({"attention": adapted(**form, batch_first=first)})
        plain = merged(net)["attention"]
        assert isinstance(plain, nn.MultiheadAttention)
        assert not isinstance(plain, LowRankAttention)
        given = inputs(plain) if first else [x.transpose(0, 1) for x in inputs(plain)]
        found, expected = (module(*given, **use) for module in (net["attention"], plain))
        for ours, theirs in zip(found, expected):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert_close_as_vector(ours.detach(), theirs.detach(), ROUNDINGS)
    square = nn.ModuleList([adapted()])
    alone = [torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(6))] * 3
    found, expected = (each[0](*alone)[0].detach() for each in (square, merged(square)))
    assert_close_as_vector(found, expected, ROUNDINGS)


def test_attention_works_under_autocast_and_as_a_function_of_its_parameters() -> None:
    net = adapted().float()
    x = [t.float() for t in inputs(net)]
    whole = net(*x, need_weights=False)[0].detach()
    for weights in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            half = net(*x, need_weights=weights)[0]
        assert half.dtype == torch.bfloat16
        assert float((half.detach().float() - whole).norm()) < 2**-5 * float(whole.norm())
    parameters = {name: torch.stack([p, 2 * p]).detach() for name, p in net.named_parameters()}

    def run(given: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(net, given, tuple(x), {"need_weights": False})[0]
        return out

    both = torch.vmap(run)(parameters)
    assert_close_as_vector(both[0], whole, ROUNDINGS)
    one = run({name: p[1] for name, p in parameters.items()}).detach()
    assert_close_as_vector(both[1], one, ROUNDINGS)


BLOCK = "encoder.layers.encoder_layer_"


@pytest.mark.parametrize(
    "name, names, expected",
    [
        (
            "vit",
            "*.query, *.value",
            [f"{BLOCK}{i}.self_attention.{part}" for i in (0, 1) for part in PARTS[::2]],
        ),
        ("vit", f"{BLOCK}1.self_attention", [f"{BLOCK}1.self_attention.{part}" for part in PARTS]),
        ("vit", f"*_1.mlp,{BLOCK}0.mlp.3", [f"{BLOCK}0.mlp.3", f"{BLOCK}1.mlp.0", f"{BLOCK}1.mlp.3"]),
        ("swin", "*.qkv", [f"features.1.{i}.attn.qkv" for i in (0, 1)]),
    ],
)
def test_names_choose_the_layers_with_adapters(name: str, names: str, expected: list[str]) -> None:
    plain, net = pair(name, lora_targets=names)
    assert list(adapters_of(net)) == expected
    assert_close_as_vector(net(images()).detach(), plain(images()).detach(), ROUNDINGS)
