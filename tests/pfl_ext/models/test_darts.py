"""The DARTS space: genotypes, the network of a search and the one that is derived from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.models.classifier import build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.darts import CellNetwork, HalvingSkip, MixedOperation, SearchNetwork
from pfl_ext.models.genotype import EDGES, OPERATIONS, Edge, Genotype, read_genotype, strongest

TEXT = (
    "normal=sep_conv_3x3@0,skip_connect@1,max_pool_3x3@0,dil_conv_5x5@2,avg_pool_3x3@1,sep_conv_5x5@3,"
    "skip_connect@0,dil_conv_3x3@4 "
    "reduce=skip_connect@0,max_pool_3x3@1,sep_conv_3x3@1,dil_conv_3x3@2,skip_connect@1,skip_connect@2,"
    "avg_pool_3x3@0,sep_conv_5x5@4"
)


def build(arch: str, **keys: Any) -> Any:
    config = ModelConfig(arch=arch, **{"input_size": 8, "cells": 3, "cell_channels": 4, "groups": 2, **keys})
    return build_backbone(config, 10, torch.Generator().manual_seed(3))


def test_a_genotype_is_read_as_it_is_written_and_from_a_file(tmp_path: Path) -> None:
    genotype = read_genotype(TEXT)
    assert genotype.text == TEXT
    assert genotype.normal[3] == Edge("dil_conv_5x5", 2)
    assert genotype.reduce[-1] == Edge("sep_conv_5x5", 4)
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"genotype": TEXT, "rounds": 1}))
    assert ModelConfig(genotype=str(path)) == ModelConfig(genotype=TEXT), "the path is no part of the config"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("nowhere.json", "No such file"),
        ("normal=skip_connect@0 reduce=skip_connect@0", "a cell has 4 nodes with two different inputs each"),
        (TEXT.replace("sep_conv_3x3@0", "none@0"), "'none' is none of max_pool_3x3, "),
        (TEXT.replace("skip_connect@1,max_pool_3x3@0", "skip_connect@2,max_pool_3x3@0"), "has no input '2'"),
        (TEXT.replace("skip_connect@1,max_pool_3x3@0", "skip_connect@0,max_pool_3x3@0"), "two different inp"),
        (TEXT.partition(" ")[0], "no cell 'reduce'"),
        (f"{TEXT} other=x", "no kind of cell other"),
    ],
)
def test_what_is_no_genotype_is_one_line(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^model\.genotype is ") as caught:
        read_genotype(given)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_two_strongest_inputs_count_by_their_strongest_operation_but_none() -> None:
    alphas = torch.zeros(EDGES, len(OPERATIONS))
    alphas[0, 4] = 1.0  # node 2: both inputs, whatever their strength
    alphas[1, 0], alphas[1, 3] = 9.0, 0.5  # "none" is never chosen
    alphas[2, 2], alphas[3, 5], alphas[4, 7] = 1.0, 3.0, 2.0  # node 3: inputs 1 and 2
    alphas[5, 1], alphas[5, 0] = 4.0, 9.0  # node 4: "none" takes the share of input 0, so that 2 and 3 win
    alphas[7, 6], alphas[8, 1] = 1.0, 1.5
    alphas[13, 2], alphas[9, 5] = 1.0, 2.0  # node 5: inputs 0 and 4
    assert strongest(alphas.tolist()) == tuple(
        Edge(OPERATIONS[o], source)
        for o, source in ((4, 0), (3, 1), (5, 1), (7, 2), (6, 2), (1, 3), (5, 0), (2, 4))
    )


def test_an_edge_of_the_search_is_the_sum_of_its_operations_by_their_shares() -> None:
    torch.manual_seed(0)
    edge, x = MixedOperation(4, 2), torch.randn(2, 4, 8, 8)
    shares = torch.randn(8).softmax(0)
    expected = sum(float(share) * one(x) for share, one in zip(shares, edge.operations))
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(edge(x, shares), expected)
    assert expected.shape == (2, 4, 4, 4)
    assert not edge.operations[0](x).any(), "none"


def test_the_search_network_has_all_operations_and_alpha_of_each_kind_mixes_its_cells() -> None:
    network = build("darts_search")
    assert isinstance(network, SearchNetwork)
    assert [cell.halves for cell in network.cells] == [False, True, True]
    assert sum(isinstance(m, MixedOperation) for m in network.modules()) == 3 * 14
    assert {tuple(alpha.shape) for alpha in network.alphas} == {(14, 8)}
    assert network.classifier.in_features == 4 * 16
    images = torch.randn(2, 3, 8, 8)
    network(images).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.alphas)
    stem = network.stem(images).detach()
    out = network.run(network.cells[0], stem, stem).square().sum()
    normal, reduce = torch.autograd.grad(out, network.alphas, allow_unused=True)
    assert (normal is None, reduce is None) == (False, True), "the first cell halves nothing"
    with torch.no_grad():  # with one operation an edge: that of the edge alone
        for alpha in network.alphas:
            alpha.fill_(-100.0)[:, 3] = 100.0
        cell: Any = network.cells[0]
        states = [cell.before_last(stem), cell.last(stem)]
        for _ in range(4):
            states.append(torch.stack(states).sum(0))
        found = cell(stem, stem, network.alpha_normal.softmax(1))
        torch.testing.assert_close(found, torch.cat(states[2:], 1))
    assert network.genotype().normal[:2] == (Edge("skip_connect", 0), Edge("skip_connect", 1))


def _of(name: str, c: int, stride: int) -> int:
    """Parameters of a derived operation of c channels, counted by hand."""
    if "pool" in name or (name == "skip_connect" and stride == 1):
        return 0
    if name == "skip_connect":
        return c * c + 2 * c  # two convolutions to c / 2 channels, and the norm's scale and shift
    one = int(name[-1]) ** 2 * c + c * c + 2 * c
    return one if name.startswith("dil") else 2 * one


def test_the_derived_network_has_the_operations_of_its_genotype_and_no_others() -> None:
    genotype = read_genotype(TEXT)
    network = build("darts", genotype=TEXT)
    assert isinstance(network, CellNetwork)
    cells: Any = network.cells
    found = [[Edge(_name(m), source) for m, source in zip(cell.edges, cell.sources)] for cell in cells]
    assert found == [list(genotype.normal), list(genotype.reduce), list(genotype.reduce)]
    assert network(torch.randn(2, 3, 8, 8)).shape == (2, 10)

    # the stem has 12 channels; cells of 4, 8 and 16 give 16, 32 and 64
    count = 3 * 12 * 9 + 2 * 12 + 64 * 10 + 10
    for cell, (inputs, c, edges) in enumerate(
        [((12, 12), 4, genotype.normal), ((12, 16), 8, genotype.reduce), ((16, 32), 16, genotype.reduce)]
    ):
        count += sum(n * c + 2 * c for n in inputs)  # 1 x 1 or halving, to c channels
        count += sum(_of(e.operation, c, 2 if cell and e.input < 2 else 1) for e in edges)
    assert sum(p.numel() for p in network.parameters()) == count


def _name(module: nn.Module) -> str:
    if isinstance(module, nn.Identity | HalvingSkip):
        return "skip_connect"
    if isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
        return f"{'max' if isinstance(module, nn.MaxPool2d) else 'avg'}_pool_{module.kernel_size}x3"
    assert isinstance(module, nn.Sequential)
    each = [m for m in module if isinstance(m, nn.Conv2d) and m.groups > 1]
    kind = "dil" if each[0].dilation == (2, 2) else "sep"
    assert len(each) == (1 if kind == "dil" else 2)
    return f"{kind}_conv_{each[0].kernel_size[0]}x{each[0].kernel_size[1]}"


def test_outputs_depend_on_the_image_and_a_group_of_one_channel_is_refused() -> None:
    for arch, keys in (("darts_search", {}), ("darts", {"genotype": TEXT})):
        outputs = build(arch, **keys)(torch.randn(2, 3, 8, 8))
        assert (outputs[0] - outputs[1]).abs().max() > 1e-3
        with pytest.raises(ValueError, match=r"set model\.groups to at most 2"):
            build(arch, **keys, groups=4)
    with pytest.raises(ValueError, match=r"model\.genotype is none: give the results\.json of a search"):
        build("darts")
    with pytest.raises(ValueError, match=r"choose another model\.input_size"):
        build("darts_search", input_size=10)
    for wrong in ({"cells": 2}, {"cell_channels": 1}):
        with pytest.raises(ValueError, match="greater than or equal"):
            ModelConfig(**wrong)  # type: ignore[arg-type]


def test_the_paper_has_eight_cells_of_sixteen_channels_and_halves_at_thirds() -> None:
    network = build("darts", genotype=TEXT, cells=8, cell_channels=16, groups=8)
    assert [cell.halves for cell in network.cells] == [i in (2, 5) for i in range(8)]
    assert isinstance(read_genotype(TEXT), Genotype)
