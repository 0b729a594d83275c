"""Weights from a file or from a known source, for a network that `pfl_ext.models.classifier` has built."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from pfl_ext.models.decoders import EncoderDecoder
from pfl_ext.models.lora_targets import selects
from pfl_ext.models.positions import resize_positions
from pfl_ext.models.pretrained import TORCHVISION, source_in, source_of

IMAGENET = "imagenet"
"""Value of ``weights`` for the source in `pfl_ext.models.pretrained`."""
SUFFIXES = (".pth", ".pt", ".safetensors")
WRAPPERS = ("state_dict", "model")
"""Names under which training scripts save a network beside their optimiser."""
PREFIXES = ("module.", "backbone.")
"""What torch's DistributedDataParallel, and a model that a run of ours saved, put before every name."""
_DRAWN = "drawn_beside_weights"
"""Attribute of a network that has new parameters beside those of its weights: their names."""
EARLIER = (
    (r"\bmlp\.linear_1\.", "mlp.0."),
    (r"\bmlp\.linear_2\.", "mlp.3."),
    (r"(\bdenselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2"),
)
"""Names of layers in torchvision's files of vision transformers and DenseNets, as patterns, and in its code.

Those files are older than the names in the code, and torchvision renames their layers when it loads them.
"""


def read_weights(arch: str, weights: str | Path) -> tuple[dict[str, Tensor], str]:
    """The tensors under the network's names for them, and a description of their source for messages.

    Raises:
        ValueError: when they cannot be downloaded or read.
    """
    if str(weights) == IMAGENET:
        source = source_of(arch)
        if source is None:
            raise ValueError(f"there are no {TORCHVISION} weights for {arch}; give --weights FILE")
    else:
        file = Path(weights)
        if file.suffix not in SUFFIXES:
            raise ValueError(f"weights {file}: must be {IMAGENET!r} or a file named {', '.join(SUFFIXES)}")
        if not file.is_file():
            raise ValueError(f"weights file {file} does not exist")
        source = source_in(arch, file)
    path = source.path()
    tensors = {source.renamed(name): tensor for name, tensor in _read(path).items()}
    return tensors, f"weights file {path}"


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or foreign file makes the parsers raise
        reason = str(error).strip().split("\n")[0][:150] or type(error).__name__
        raise ValueError(
            f"weights file {path} cannot be read as {path.suffix} ({reason}); it is damaged or of another "
            "kind, so fetch it again"
        ) from error
    for name in WRAPPERS:
        if isinstance(tensors, Mapping) and isinstance(tensors.get(name), Mapping):
            tensors = tensors[name]
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in tensors.items()
    ):
        raise ValueError(f"weights file {path} is not a mapping of names to tensors; save a state_dict")
    return dict(tensors)


def load_weights(
    backbone: nn.Module,
    head: str | None,
    arch: str,
    tensors: dict[str, Tensor],
    source: str,
    new: Sequence[str] = (),
) -> None:
    """Copy every tensor but those of the layers under ``head``: one, or two if the file has a bottleneck.

    With ``head`` None every tensor is copied. For a network with a decoder, a classifier's file provides only
    the encoder, and its other tensors are ignored. The position embedding of a vision transformer for images
    of another size is interpolated (`pfl_ext.models.positions`). What ``new`` selects stays as it was drawn
    where the file has nothing of it; `drawn_in` says so.

    Raises:
        ValueError: unless names and all other shapes are exactly the network's, and all numbers finite.
    """
    tensors = _without_prefix(tensors, backbone)
    if isinstance(backbone, EncoderDecoder) and not any(name.startswith("encoder.") for name in tensors):
        if head is None:
            raise ValueError(f"{source} holds no decoder of {arch}: set model.keep_head to false")
        encoder = backbone.encoder
        tensors = {name: tensor for name, tensor in tensors.items() if name not in encoder.left_out}
        backbone, arch, head = encoder, encoder.arch, None
    absent = backbone.state_dict().keys() - tensors.keys()
    tensors = {_name_today(name, absent): tensor for name, tensor in tensors.items()}
    tensors = resize_positions(backbone, tensors)
    left_out = () if head is None else (f"{head}.",)
    wanted = {name: t for name, t in backbone.state_dict().items() if not name.startswith(left_out)}
    loaded = {
        name: t
        for name, t in tensors.items()
        if not name.startswith(left_out) and not name.endswith("num_batches_tracked")
    }
    added = {name for name in wanted if any(selects(pattern, name) for pattern in new)}
    if added and not added & loaded.keys():
        vars(backbone)[_DRAWN] = sorted(added)
        wanted = {name: tensor for name, tensor in wanted.items() if name not in added}
    _check_fit(loaded, wanted, source, arch, keeps_head=head is None)
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(loaded[name])
    if bad := [name for name, tensor in wanted.items() if not tensor.isfinite().all()]:
        raise ValueError(
            f"{source} holds numbers that are not finite (NaN, infinity, or too large for float32), in "
            f"{some(bad)}: give other weights"
        )


def _without_prefix(tensors: dict[str, Tensor], backbone: nn.Module) -> dict[str, Tensor]:
    """The tensors by their names in the network: without one of `PREFIXES` that all have, but none there."""
    for prefix in PREFIXES:
        own = any(name.startswith(prefix) for name in backbone.state_dict())
        if tensors and not own and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _check_fit(
    loaded: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: str, arch: str, keeps_head: bool
) -> None:
    """Raise ValueError unless a file has exactly the tensors that a network needs of it."""
    missing, unexpected = wanted.keys() - loaded.keys(), loaded.keys() - wanted.keys()
    if unexpected and all(name.endswith(("running_mean", "running_var")) for name in unexpected):
        raise ValueError(
            f"{source} holds BatchNorm statistics, for which GroupNorm has no place: set model.norm to auto, "
            "or give weights trained with GroupNorm"
        )
    statistics = {name for name in wanted if name.endswith(("running_mean", "running_var"))}
    if statistics and statistics == missing and not unexpected:
        raise ValueError(
            f"{source} has no BatchNorm statistics, since {arch} was trained from scratch, with GroupNorm: "
            "set model.norm to group"
        )
    wrong = [
        f"{name} is {tuple(loaded[name].shape)} {loaded[name].dtype} for {tuple(wanted[name].shape)}"
        for name in wanted
        if name in loaded and not _fits(loaded[name], wanted[name])
    ]
    found = [
        *([f"missing {some(sorted(missing))}"] if missing else []),
        *([f"unexpected {some(sorted(unexpected))}"] if unexpected else []),
        *([f"of the wrong shape or type {some(wrong)}"] if wrong else []),
    ]
    if found:
        remedy = " with these labels, or set model.keep_head to false" if keeps_head else ""
        if all("pos_embedding" in each for each in (*missing, *unexpected, *wrong)):  # of or for one patch
            remedy = " for images of this size, or choose another model.input_size"
        raise ValueError(f"{source} does not fit {arch}: {'; '.join(found)}; give weights of {arch}{remedy}")


def drawn_in(network: nn.Module) -> list[str]:
    """The new parameters and buffers of a network for which its weights have nothing."""
    found = (vars(layer).get(_DRAWN, []) for layer in network.modules())
    return [name for names in found for name in names]


def _name_today(name: str, absent: Container[str]) -> str:
    """A tensor's name in the network for its name in a file without ``absent`` names (`EARLIER`)."""
    renamed = name
    for old, new in EARLIER:
        renamed = re.sub(old, new, renamed)
    return renamed if renamed in absent else name


def _fits(tensor: Tensor, wanted: Tensor) -> bool:
    same_kind = tensor.dtype.is_floating_point == wanted.dtype.is_floating_point
    return same_kind and tensor.shape == wanted.shape


def some(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
