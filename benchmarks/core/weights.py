"""The weights that a run starts from: the file that it asks for, what its input must be, and its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree
from dataset.files import file_digest, state_of
from pfl_ext import checkpoint
from pfl_ext.devices import traces
from pfl_ext.models.decoders import outputs_of
from pfl_ext.models.pretrained import source_in, source_of

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)


@lru_cache(maxsize=8)
def _sha256_of(path: Path, _: str) -> str:
    return file_digest(path)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; a file that has not changed is read once."""
    return _sha256_of(path.resolve(), state_of(path))


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
            "--weights can be used only if pretrained weights are loaded: add --model.pretrained=true, "
            "or choose a config that has it"
        )
    if not file.is_file():
        raise ValueError(f"--weights {file}: no such file")
    sha256, wanted, known = sha256_of(file), config.model.weights_sha256, source_of(config.model.arch)
    found = None if known is not None and known.is_of(sha256) else sha256  # a known source needs no name
    if wanted not in (None, found):
        raise ValueError(f"--weights {file} is not the file that the config needs, whose SHA-256 is {wanted}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, weights_sha256=found))


def with_traces(config: SomeConfig) -> SomeConfig:
    """The config with the hashes of the files that its ``devices`` name.

    Raises:
        ValueError: in one line, when there is no such file, or the config asks for another one.
    """
    devices = config.devices
    if devices is None:
        return config
    found: Tree = {}
    for key in ("capacities", "availability"):
        if (name := getattr(devices, key)) is not None:
            known = getattr(devices, f"{key}_sha256")
            found[f"{key}_sha256"] = traces.sha256_of(f"devices.{key}", Path(name), known)
    return dataclasses.replace(config, devices=dataclasses.replace(devices, **found))


def weights_facts(config: TrainingConfig, weights: Path | None) -> Tree | None:
    """What is recorded of the weights that training began from; None from scratch.

    Licence, description and normalisation are None where they are not known. ``torchvision`` says whether
    the weights are torchvision's of ImageNet. Of the model of a run of ours, ``experiment_sha256`` is the
    digest of what its seeds have in common, and ``learnt_from`` has the checksums of its training data.

    Args:
        config: of the run.
        weights: their file; None takes those of the network's known source.
    """
    arch = config.model.arch
    if not config.model.pretrained:
        return None
    source = source_of(arch) if weights is None else source_in(arch, weights)
    assert source is not None, "the network was loaded from it"
    file = source.path()
    return {
        "file": file.name,
        "sha256": sha256_of(file),
        "description": source.description,
        "licence": source.licence,
        "normalisation": source.normalisation,
        "torchvision": source.is_torchvisions,
        **({} if source.experiment_sha256 is None else {"experiment_sha256": source.experiment_sha256}),
        **({"learnt_from": list(source.learnt_from)} if source.learnt_from else {}),
    }


def from_torchvision(weights: Tree | None) -> bool:
    """Whether recorded weights are torchvision's of ImageNet; earlier runs say it by the key ``imagenet``."""
    return bool(weights and weights.get("torchvision", weights.get("imagenet")))


def check_origin(config: TrainingConfig, weights: Path | None) -> None:
    """Refuse an input, or groups of GroupNorm, with which the first weights were not trained.

    Both are known of a package's weights and of a run's model. torchvision's may have any input.

    Args:
        config: of the run.
        weights: the file of its first weights; None: those of the network's known source.

    Raises:
        ValueError: one line that says which value the weights need.
    """
    model = config.model
    if not model.pretrained:
        return
    source = source_of(model.arch) if weights is None else source_in(model.arch, weights)
    if source is None or source.is_torchvisions:
        return
    if source.normalisation not in (None, model.normalisation):
        raise ValueError(
            f"model.normalisation is {model.normalisation}, but the weights of {model.arch} were "
            f"trained on another input: set it to {source.normalisation}"
        )
    grouped = not model.has_fixed_statistics or outputs_of(model.arch) == "pixels"  # as new decoders are
    if grouped and source.groups not in (None, model.groups):
        raise ValueError(
            f"model.groups is {model.groups}, but the weights of {model.arch} were trained with other "
            f"groups: set it to {source.groups}"
        )


def check_classes(config: TrainingConfig, weights: Path | None, names: Sequence[str]) -> None:
    """Refuse a head that is kept for other classes, or for the same ones in another order.

    A file that names no classes, such as one that others wrote, is not refused.

    Args:
        config: of the run.
        weights: the file of its first weights.
        names: of the classes that the run's head has outputs for.

    Raises:
        ValueError: one line that names the first class that differs.
    """
    if weights is None or not config.model.keep_head or weights.suffix != ".safetensors":
        return
    try:
        known = checkpoint.load(weights)[1].get("classes")
    except ValueError:  # weights that others wrote, or damage, which reading them reports
        return
    if not isinstance(known, list) or len(known) != len(names):
        return  # it names none, or the head does not fit, which loading it reports
    for number, (theirs, ours) in enumerate(zip(known, names)):
        if theirs != ours:
            kind = "the same classes in another order" if set(known) == set(names) else "other classes"
            raise ValueError(
                f"--weights {weights} has a last layer for {kind}: its output {number} is {theirs!r}, "
                f"but in the data it is {ours!r}: set model.keep_head to false, or give data with the "
                "classes of the file"
            )
