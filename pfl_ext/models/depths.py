"""The depth of each parameter of a network, by which ``layer_decay`` lowers learning rates.

Fine-tuning a vision transformer, BEiT (Bao et al. 2022, arXiv 2106.08254) and MAE (He et al. 2022, arXiv
2111.06377) train first layers more slowly than last ones: with a decay d, a parameter of depth i has
``d^(D - i)`` times the head's rate, and the head has depth D. Here depth is the number of the block in
`pfl_ext.models.trained.blocks_of`. For a vision transformer this is timm's numbering: 0 for patches, class
token and position embedding, 1 ... L for the encoder's blocks, the last of which has the final norm, and
``D = L + 1``. (BEiT and MAE count the final norm as the head's.) A ResNet has 0 for its stem, then its
residual blocks. Parameters outside of blocks have depth 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from pfl_ext.models.config import ModelConfig
from pfl_ext.models.trained import blocks_of, follow_one_another, new_part

LEAST_FACTOR = 1e-5
"""The smallest factor of a learning rate: with a smaller one, steps would be lost in float32's rounding."""


@dataclass(frozen=True)
class Depths:
    """The blocks of a network, first to last, and its head (decoder, bottleneck and last layer)."""

    blocks: tuple[tuple[str, ...], ...]
    """The names of the modules of each block."""
    head: str

    @classmethod
    def of_network(cls, backbone: nn.Module) -> Depths:
        """Those of a network as it is built."""
        head = new_part(backbone)
        return cls(tuple(map(tuple, blocks_of(backbone, head))), head)

    @property
    def last(self) -> int:
        """The head's depth, D."""
        return len(self.blocks)

    def depth(self, name: str) -> int:
        """The depth of a parameter, by its name in the network."""
        if self.has_head(name):
            return self.last
        found = (k for k, block in enumerate(self.blocks) if name.startswith(tuple(f"{m}." for m in block)))
        return next(found, 0)

    def has_head(self, name: str) -> bool:
        """Whether a parameter is one of the head."""
        return not self.head or name.startswith(f"{self.head}.")

    def rate_factor(self, name: str, head_rate_factor: float, layer_decay: float) -> float:
        """A parameter's learning rate relative to that of the layers before the head without a decay."""
        if self.has_head(name):
            return head_rate_factor
        return float(layer_decay ** (self.last - self.depth(name)))


@torch.no_grad()
def check_layer_decay(backbone: nn.Module, config: ModelConfig, key: str, decay: float) -> None:
    """Refuse a decay that has no effect, whose rates are too small, or of a network without an order.

    Args:
        backbone: the network, with its trained part chosen.
        config: the network's config.
        key: the decay's key in the config.
        decay: learning rate of a block divided by that of the next one.

    Raises:
        ValueError: one line that names the key and the remedy.
    """
    if decay == 1:
        return
    depths = Depths.of_network(backbone)
    trained = [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
    factors = [depths.rate_factor(name, 1.0, decay) for name in trained if not depths.has_head(name)]
    if not factors:
        raise ValueError(f"{key} is {decay:g}, but only the last layer is trained: set {key} to 1")
    names = [*(name for block in depths.blocks for name in block), depths.head]
    images = torch.zeros(1, 3, config.input_size, config.input_size)
    if not follow_one_another(backbone, names, images):
        raise ValueError(
            f"{key} is {decay:g}, but the blocks of {config.arch} are not run one after another, each once: "
            f"set {key} to 1"
        )
    if min(factors) < LEAST_FACTOR:
        larger = math.ceil(100 * LEAST_FACTOR ** (1 / depths.last)) / 100
        raise ValueError(
            f"{key} is {decay:g}, by which the first of {depths.last} blocks has {min(factors):.1g} times "
            f"the learning rate, too little for float32: choose a larger one, as {larger:.2g}, or freeze "
            "blocks with model.trained last_blocks"
        )
