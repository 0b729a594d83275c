"""Which weights file a pretrained network starts from, by its content."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TypeVar

from torchvision import models as zoo

from benchmarks.core.config.sections import TrainingConfig
from dataset.files import file_digest

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)


@lru_cache(maxsize=8)
def _sha256_of(path: Path, size: int, changed_ns: int) -> str:
    return file_digest(path)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; a file that has not changed is read once."""
    state = path.stat()
    return _sha256_of(path.resolve(), state.st_size, state.st_mtime_ns)


def torchvision_name(arch: str) -> str | None:
    """The file name of torchvision's first ImageNet weights of an architecture; None where it has none.

    It ends with the first digits of the content's SHA-256: ``resnet18-f37072fd.pth``.
    """
    try:
        weights = zoo.get_model_weights(arch).__members__.get("IMAGENET1K_V1")
    except ValueError:
        return None
    return None if weights is None else PurePosixPath(weights.url).name


def is_torchvisions(arch: str, sha256: str) -> bool:
    """Whether this is the SHA-256 of torchvision's ImageNet weights of an architecture."""
    name = torchvision_name(arch)
    return name is not None and sha256.startswith(PurePosixPath(name).stem.rpartition("-")[2])


def weights_sha256(arch: str, file: Path) -> str | None:
    """SHA-256 of a weights file; None where it is torchvision's own, which needs no name."""
    sha256 = sha256_of(file)
    return None if is_torchvisions(arch, sha256) else sha256


def with_weights(config: SomeConfig, file: Path | None) -> SomeConfig:
    """The config with the hash of the weights file that ``--weights`` names.

    Raises:
        ValueError: when the network starts from scratch, there is no such file, or the config asks for
            another one.
    """
    if file is None:
        return config
    if not config.model.pretrained:
        raise ValueError(
            "--weights is for fine-tuning settings: add --model.pretrained=true, or choose such a config"
        )
    if not file.is_file():
        raise ValueError(f"--weights {file}: no such file")
    found, wanted = weights_sha256(config.model.arch, file), config.model.weights_sha256
    if wanted not in (None, found):
        raise ValueError(f"--weights {file} is not the file of the config, whose SHA-256 is {wanted}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights_sha256=found))
