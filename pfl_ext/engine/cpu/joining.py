"""Sums and ReLUs that follow a compiled GroupNorm, done by it in the same pass.

They are found in the network's graph, as torch.fx writes it down.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
RELUS = {nn.ReLU, F.relu, torch.relu, torch.relu_, "relu", "relu_"}


class Joined(nn.Module):
    """A network's layers and parameters, by the same names and in the same order, with another forward.

    An `fx.GraphModule` would order them by use, and so would its copies, but parameters are matched by order.
    """

    def __init__(self, network: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        for name, child in network.named_children():
            self.add_module(name, child)
        for name, parameter in network.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in network.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in network.state_dict())
        self._run = type(fx.GraphModule(network, graph)).forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the network's, but for joined layers."""
        return self._run(self, *args, **kwargs)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not list(m.children())


def joined(network: nn.Module, norms: type[nn.Module]) -> nn.Module:
    """The network with such norms doing the sums and ReLUs after them that nothing else sees.

    The network itself where there are none, or where its forward cannot be written down as a graph.
    """
    try:
        graph = _Tracer().trace(network)
    except Exception:  # whatever fx, or the network's own forward, makes of inputs without values
        return network
    layers = dict(network.named_modules())

    def kind(node: fx.Node) -> Any:
        return type(layers[str(node.target)]) if node.op == "call_module" else node.target

    found = False
    for norm in [node for node in graph.nodes if kind(node) is norms]:
        after, added = [*norm.users], None
        if len(after) == 1 and kind(after[0]) in SUMS and _plain_sum(after[0]):
            added = next(node for node in after[0].all_input_nodes if node is not norm)
            after = [after[0], *after[0].users]
        if len(after) == 1 + (added is not None) and kind(after[-1]) in RELUS:
            with graph.inserting_before(after[-1]):
                call = graph.call_module(str(norm.target), norm.args, {"relu": True, "added": added})
            after[-1].replace_all_uses_with(call)
            for node in (*after[::-1], norm):
                graph.erase_node(node)
            found = True
    return Joined(network, graph) if found else network


def _plain_sum(node: fx.Node) -> bool:
    return len(node.args) == 2 == len(node.all_input_nodes) and not node.kwargs
