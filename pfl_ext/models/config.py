"""The config section of a network, from which `pfl_ext.models.classifier.build_backbone` builds it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from pfl_ext.configs import STRICT
from pfl_ext.data.normalisation import Normalisation
from pfl_ext.models.genotype import read_genotype

Init = Literal["he", "keras", "torchvision", "xavier"]
Trained = Literal["all", "head", "two_layers", "last_blocks", "lora", "bias", "norms", "names"]
ON_FEATURES = ("head", "two_layers")
"""Values of ``trained`` for which the trained layers take one vector for each image."""
LoraTrained = Literal["both", "b"]
ALL_TARGETS, CALLED = "all", "called"
"""Values of ``lora_targets`` that are no names: all layers; those that the network calls, as older runs."""
Norm = Literal["auto", "group"]
ChannelNorm = Literal["group", "data"]
FeatureFormat = Literal["float32", "float16"]


def _joined(names: Any) -> Any:
    """A list of names, as YAML may have it, in one text."""
    are_words = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    return ",".join(names) if are_words else names


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The network."""

    arch: str = "resnet18"
    """Name of one of torchvision's classifiers, or of a network registered in `pfl_ext.models`."""
    input_size: PositiveInt = 224
    """Side of the square that the network sees, cut from the image, in pixels."""
    normalisation: Normalisation = "imagenet"
    """Mean and deviation of the input: ImageNet's; none; half: 0.5; EfficientNet-Lite's; the data's."""
    pretrained: bool = False
    """Whether training begins with given weights: ImageNet's, or those of a file; false: from scratch."""
    norm: Norm = "auto"
    """What BatchNorm becomes; group: GroupNorm; auto: fixed statistics if pretrained, GroupNorm if not."""
    keep_head: bool = False
    """Whether the last layer of the weights file is used too; false: it is a new one."""
    groups: PositiveInt = 32
    """Maximum number of groups of a GroupNorm; the largest divisor of the channels up to this is used."""
    channel_norm: ChannelNorm = "group"
    """Norm without parameters, in networks with one: over an image's groups, or by all training images."""
    bottleneck: PositiveInt | None = None
    """Units of an additional linear layer before the classifier; none: no such layer."""
    random_features: PositiveInt | None = None
    """Number of random features (Gaussian kernel, not trained) for the last layer; none: the network's."""
    random_features_width: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """Width of that kernel, for features of length 1, which are at most 2 apart."""
    parties: Annotated[int, Field(ge=2, le=4, multiple_of=2)] | None = None
    """Number of parties, each with a network for its part of the image: 2 halves, 4 quadrants; none: one."""
    trained: Trained = "all"
    """What is trained. Last layer and decoder always are, except with names; head, two_layers: only these."""
    trained_names: str | None = None
    """Names of the trained layers or parameters, separated by commas; * stands for any characters."""
    last_blocks: PositiveInt = 1
    """Number of blocks before the last layer that are trained (residual blocks; layers of small networks)."""
    feature_format: FeatureFormat = "float32"
    """Type in which features of frozen layers are stored; float16: rounded to 11 bits, in half the space."""
    lora_rank: PositiveInt = 8
    """Rank of LoRA's update of each layer that has one: linear, convolution, or projection of attention."""
    lora_alpha: PositiveFloat = 8.0
    """LoRA's update is multiplied by this and divided by the rank."""
    lora_trained: LoraTrained = "both"
    """What is trained of LoRA's adapters: A and B, or only B, with A as drawn from the seed (FFA-LoRA)."""
    lora_targets: Annotated[str, BeforeValidator(_joined)] = ALL_TARGETS
    """Layers with LoRA: all; their names, by commas, with * for any characters; called: without attention."""
    cells: Annotated[int, Field(ge=3)] = 8
    """Number of cells of a DARTS network, at least 3; two of them halve the image."""
    cell_channels: Annotated[int, Field(ge=2)] = 16
    """Channels of each node in the first cell of a DARTS network."""
    genotype: str | None = None
    """Edges of a derived DARTS network's cells: the path of a search's results.json, or the text in it."""
    init: Init = "torchvision"
    """Distribution of initial weights: torchvision's, Keras', He's normal, or Glorot's uniform (xavier)."""
    dropout: bool = False
    """Whether the network's own dropout and stochastic depth act in training; false: they are left out."""

    @property
    def has_fixed_statistics(self) -> bool:
        """Whether BatchNorm stays, with the statistics of its weights; otherwise it becomes GroupNorm."""
        return self.pretrained and self.norm == "auto"

    def __post_init__(self) -> None:
        if self.genotype is not None:  # the content is part of the config, its path is not
            object.__setattr__(self, "genotype", read_genotype(self.genotype).text)
        if self.parties is not None:
            self._check_parties()
        if self.random_features is not None and self.bottleneck is not None:
            raise ValueError(
                f"model.random_features is {self.random_features} and model.bottleneck is "
                f"{self.bottleneck}, but only one layer can be before the last: set one of them to none"
            )
        for key in ("trained_names", "lora_targets"):
            if (given := getattr(self, key)) is None:
                continue
            names = [name.strip() for name in given.split(",")]
            if not all(names):
                raise ValueError(
                    f"model.{key} is {given!r}, with an empty name: separate names of layers by single commas"
                )
            object.__setattr__(self, key, ",".join(dict.fromkeys(names)))
        if self.trained == "names" and self.trained_names is None:
            raise ValueError(
                "model.trained is names, but model.trained_names is none: set it to names of layers, "
                "separated by commas"
            )
        if self.trained == "two_layers" and self.bottleneck is None:
            raise ValueError("model.trained is two_layers, which needs a bottleneck: set model.bottleneck")
        if self.trained == "head" and self.bottleneck is not None:
            raise ValueError(
                "model.trained is head, so a bottleneck before the head would not be trained: set "
                "model.trained to two_layers, or model.bottleneck to none"
            )

    def _check_parties(self) -> None:
        if self.input_size % 2:
            raise ValueError(
                f"model.parties is {self.parties}, which needs an even model.input_size, but it is "
                f"{self.input_size}: choose an even one"
            )
        with_one_head = self.bottleneck or self.random_features or self.dropout or self.trained != "all"
        if with_one_head or (self.pretrained and not self.keep_head):
            raise ValueError(
                f"model.parties is {self.parties}, whose networks each have a last layer: set "
                "model.bottleneck and model.random_features to none, model.dropout to false, "
                "model.trained to all, and model.keep_head to true where model.pretrained is"
            )
