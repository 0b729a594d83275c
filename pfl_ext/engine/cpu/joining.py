"""Joins compiled layers with the operations that follow them, so that one pass computes both.

A GroupNorm takes over sums and ReLUs; a convolution of few channels takes over ReLU and pooling.

These operations are found in the network's graph, as torch.fx traces it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from pfl_ext.models.lora_layers import LowRank
from pfl_ext.models.prefix import Holding

SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
RELUS = {nn.ReLU, F.relu, torch.relu, torch.relu_, "relu", "relu_"}


class Joined(Holding):
    """A network's layers and parameters, with the same names and order, and another forward.

    An `fx.GraphModule` and its copies order them by use, but parameters are matched by their order.
    """

    def __init__(self, network: nn.Module, graph: fx.Graph) -> None:
        super().__init__(network)
        self._run = type(fx.GraphModule(network, graph)).forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's ``forward`` with joined layers."""
        return self._run(self, *args, **kwargs)


class Pooled(nn.MaxPool2d):
    """A max-pooling of 2 x 2 positions that the convolution before it computes."""

    multiplied = torch.float32

    def __init__(self) -> None:
        super().__init__(2)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LowRank) or not list(m.children())


def joined(
    network: nn.Module,
    norms: type[nn.Module],
    convolutions: type[nn.Module],
    linear: type[nn.Module],
    pooled: Callable[[nn.Module], nn.Module | None] = lambda layer: None,
) -> nn.Module:
    """The network whose layers of these types compute what follows them, if nothing else uses their output.

    ``pooled`` maps a further layer to its replacement if its outputs are pooled; None leaves it as it is.

    Returns the network itself if there are no such layers, or if its forward cannot be traced as a graph.
    """
    try:
        graph = _Tracer().trace(network)
    except Exception:  # fx and the network's forward may raise anything for inputs without values
        return network
    layers, found = dict(network.named_modules()), False
    for node in [node for node in graph.nodes if node.op == "call_module"]:
        layer, other = layers[str(node.target)], None
        if type(layer) is norms:
            found |= _join_norm(graph, node, layers)
            continue
        if type(layer) not in (convolutions, linear) and (other := pooled(layer)) is None:
            continue
        after, does = _followers(node, layers, ["relu"] if type(layer) is linear else ["relu", "pool"])
        if after and (other is None or does["pool"]):
            if other is not None:
                network.set_submodule(str(node.target), other)
            for following in after:
                if _kind(following, layers) is nn.MaxPool2d:
                    network.set_submodule(str(following.target), Pooled())
            _join(graph, [node, *after], does)
            found = True
    return Joined(network, graph) if found else network


def _kind(node: fx.Node, layers: dict[str, nn.Module]) -> Any:
    """The type of the layer that is called, or what else is done."""
    return type(layers[str(node.target)]) if node.op == "call_module" else node.target


def _join_norm(graph: fx.Graph, norm: fx.Node, layers: dict[str, nn.Module]) -> bool:
    """Let a norm compute a sum and the ReLU after it, or the ReLU alone; False where no ReLU follows."""
    after, added = [*norm.users], None
    if len(after) == 1 and _kind(after[0], layers) in SUMS and _plain_sum(after[0]):
        added = next(node for node in after[0].all_input_nodes if node is not norm)
        after = [after[0], *after[0].users]
    joins = len(after) == 1 + (added is not None) and _kind(after[-1], layers) in RELUS
    if joins:
        _join(graph, [norm, *after], {"relu": True, "added": added})
    return joins


def _followers(
    node: fx.Node, layers: dict[str, nn.Module], possible: list[str]
) -> tuple[list[fx.Node], dict[str, Any]]:
    """The nodes after this one that its layer could compute, each alone in using what is before it, and what
    of the ``possible`` they do, each once."""
    after: list[fx.Node] = []
    does: dict[str, Any] = dict.fromkeys(possible, False)
    while len(node.users) == 1:
        (node,) = node.users
        name = "relu" if _kind(node, layers) in RELUS else "pool" if _pools(node, layers) else None
        if name is None or does.get(name, True):
            break
        does[name] = True
        after.append(node)
    return after, does


def _join(graph: fx.Graph, nodes: list[fx.Node], does: dict[str, Any]) -> None:
    """Put a call of the first node's layer, which ``does`` what the others do, into the place of all."""
    with graph.inserting_before(nodes[-1]):
        call = graph.call_module(str(nodes[0].target), nodes[0].args, does)
    nodes[-1].replace_all_uses_with(call)
    for node in nodes[::-1]:
        graph.erase_node(node)


def _pools(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    """Whether this is a max-pooling of 2 x 2 positions."""
    layer = layers[str(node.target)] if node.op == "call_module" else None
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return [2 * (size,) if isinstance(size, int) else tuple(size) for size in sizes] == [
        (2, 2),
        (2, 2),
        (0, 0),
        (1, 1),
    ]


def _plain_sum(node: fx.Node) -> bool:
    return len(node.args) == 2 == len(node.all_input_nodes) and not node.kwargs
