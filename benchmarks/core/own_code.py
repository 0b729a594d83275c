"""The user's own files (`dataset.files.own_modules`): which a run is computed by, and their digests.

What a run uses of them is part of its config (`own_code`): a run does not go on with an edited file, and runs
of two versions are no seeds of one experiment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from benchmarks.core.config.sections import TrainingConfig
from dataset.files import OWN, file_digest, own_modules
from dataset.partitions.drawn import drawers, name_for, read_name
from pfl_ext.algorithms.optimizers import SERVER_OPTIMIZERS
from pfl_ext.models.small import NETWORKS

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)
DIGITS = 12
"""How much of the SHA-256 a config holds."""


def own_code() -> dict[str, str]:
    """The SHA-256 of each of the user's files: by module, and by path in a package.

    They are the modules that the user names, and those that these import from the same folder.
    """
    found: dict[str, str] = {}
    for module in own_modules():
        found |= _files(module)
    return found


def with_own_code(config: SomeConfig) -> SomeConfig:
    """The config with the digest of the user's own files that it is computed by; None: it needs none."""
    if not os.environ.get(OWN):
        return config if config.own_code is None else dataclasses.replace(config, own_code=None)
    names = {name for thing in _things(config) for name in _modules_of(thing)}
    used: dict[str, str] = {}
    for module in own_modules():
        files = _files(module)
        if any(name in files or f"{name}.".startswith(f"{module.__name__}.") for name in names):
            used |= files
    text = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(used.items()))
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS] if used else None
    return dataclasses.replace(config, own_code=digest)


def _things(config: TrainingConfig) -> Iterator[Any]:
    """What the config chooses by name."""
    if config.model.arch in NETWORKS.names():
        yield NETWORKS[config.model.arch]
    if config.mode == "centralised":
        yield SERVER_OPTIMIZERS[config.centralised.optimizer].build
        return
    yield SERVER_OPTIMIZERS[config.server.optimizer].build
    for section in (config.federated, config.compression, config.aggregation, config.attack):
        yield section.chosen
    recipe = read_name(name_for(getattr(config.data, "partition", None) or "", config.seed))
    if recipe is not None:
        yield drawers()[recipe.kind]


def _modules_of(thing: Any) -> Iterator[str]:
    for each in getattr(thing, "__mro__", (thing,)):
        yield each.__module__


def _files(module: ModuleType) -> dict[str, str]:
    """The digests of a module's own file, or of a package's, and of what it imports from its folder."""
    found: dict[str, str] = {}
    for folder in map(Path, getattr(module, "__path__", ())):
        paths = sorted(folder.rglob("*.py"))
        found |= {f"{module.__name__}/{path.relative_to(folder)}": file_digest(path) for path in paths}
    if found or not getattr(module, "__file__", None):
        return found
    left, folder = [module], Path(str(module.__file__)).parent
    while left:
        one = left.pop()
        found[one.__name__] = file_digest(Path(str(one.__file__)))
        for value in list(vars(one).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            other = sys.modules.get(name) if isinstance(name, str) else None
            path = getattr(other, "__file__", None)
            if other and path and Path(path).parent == folder and other.__name__ not in found:
                left.append(other)
    return found
