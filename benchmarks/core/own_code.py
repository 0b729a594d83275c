"""The user's own files (`dataset.files.own_modules`): which a run is computed by, and their digests.

What a run uses of them is part of its config (`own_code`): a run does not go on with an edited file, and runs
of two versions are no seeds of one experiment.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from benchmarks.core.code_version import PROJECT
from benchmarks.core.config.sections import TrainingConfig
from dataset.files import OWN, file_digest, own_modules
from dataset.partitions.drawn import drawers, name_for, read_name, registered_by
from pfl_ext.algorithms.optimizers import SERVER_OPTIMIZERS
from pfl_ext.models.small import NETWORKS
from pfl_ext.registry import Registry

SomeConfig = TypeVar("SomeConfig", bound=TrainingConfig)
DIGITS = 12
"""How much of the SHA-256 a config holds."""


def own_code(kind: type[TrainingConfig] | None = None, experiment: str = "") -> dict[str, str]:
    """The SHA-256 of each of the user's files: by module, and by path in a package.

    They are the modules that the user names, those of a benchmark of the user's own, and those that these
    import from the same folder.

    Args:
        kind: of the benchmark's configs.
        experiment: the module of the benchmark's experiment, if it is the user's.
    """
    found = {} if kind is None else _of_benchmark(kind, experiment)
    for module in own_modules():
        found |= _files(module)
    return found


def with_own_code(config: SomeConfig, experiment: str = "") -> SomeConfig:
    """The config with the digest of the user's own files that it is computed by; None: it needs none.

    They are of the modules that the user names, and of those of the benchmark, if they are the user's own.
    ``experiment`` is as for `own_code`.
    """
    used = _of_benchmark(type(config), experiment)
    if os.environ.get(OWN):
        modules = own_modules()  # which register what they add
        names = {name for by, thing in _things(config) for name in (by, *_modules_of(thing))}
        for module in modules:
            files = _files(module)
            tops = {name.partition("/")[0].partition(".")[0] for name in files} - PROJECT
            if names & files.keys() or {name.partition(".")[0] for name in names} & tops:
                used |= files
    text = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(used.items()))
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS] if used else None
    return config if config.own_code == digest else dataclasses.replace(config, own_code=digest)


def _of_benchmark(kind: type[TrainingConfig], experiment: str) -> dict[str, str]:
    """The digests of the files of a benchmark outside of this project; arguments as for `own_code`."""
    found: dict[str, str] = {}
    for module in filter(None, map(sys.modules.get, (kind.__module__, experiment))):
        found |= {} if _name(module).partition(".")[0] in PROJECT else _files(module)
    return found


def _name(module: ModuleType) -> str:
    """The name by which a module is imported, also where it runs as a command."""
    spec = module.__spec__ if module.__name__ == "__main__" else None
    return module.__name__ if spec is None else spec.name


def code_of(arch: str, network: nn.Module) -> dict[str, str]:
    """The SHA-256 of the files, of the user and of this project, that say what a network computes.

    They are those that register it or define one of its layers, and what these import from their folder. Of
    installed software there are none.

    Args:
        arch: the network's name.
        network: its layers.
    """
    layers = {type(layer).__module__ for layer in network.modules()}
    names = {name for name in layers if name.partition(".")[0] not in {*PROJECT, "torch", "torchvision"}}
    if arch in NETWORKS.names():
        by, thing = _of(NETWORKS, arch)
        names |= {by, *_modules_of(thing)}
    own = {module.__name__.partition(".")[0] for module in own_modules()}
    found: dict[str, str] = {}
    for module in filter(None, map(sys.modules.get, sorted(names))):
        top = module.__name__.partition(".")[0]
        if top in own or _place(sys.modules[top]) is not None:
            found |= _files(module)
    return found


def _things(config: TrainingConfig) -> Iterator[tuple[str, Any]]:
    """What the config chooses by name, each after the module that registered it."""
    if config.model.arch in NETWORKS.names():
        yield _of(NETWORKS, config.model.arch)
    if config.mode == "centralised":
        yield _of(SERVER_OPTIMIZERS, config.centralised.optimizer)
        return
    yield _of(SERVER_OPTIMIZERS, config.server.optimizer)
    for section in (config.federated, config.compression, config.aggregation, config.attack):
        yield _of(section.registry, section.name)
    recipe = read_name(name_for(getattr(config.data, "partition", None) or "", config.seed))
    if recipe is not None:
        yield registered_by.get(recipe.kind, ""), drawers()[recipe.kind]


def _of(registry: Registry[Any], name: str) -> tuple[str, Any]:
    thing = registry[name]
    return registry.registered_by.get(name, ""), thing


def _modules_of(thing: Any) -> Iterator[str]:
    """The modules of a class and its bases, of a function, of an instance and what it calls."""
    left = [thing]
    while left:
        item = left.pop()
        yield str(getattr(item, "__module__", ""))
        for base in (item if isinstance(item, type) else type(item)).__mro__:
            yield base.__module__
        left += [inner for name in ("build", "func") if callable(inner := getattr(item, name, None))]


def _files(module: ModuleType) -> dict[str, str]:
    """The digests of a module's own file, or of its package's, and of what these import from their folder or
    of the modules that the user names."""
    found: dict[str, str] = {}
    top = sys.modules.get(_name(module).partition(".")[0], module)
    if _name(top) in PROJECT:
        return {_name(module): file_digest(Path(str(module.__file__)))}
    folder, left, seen = _place(top), [top], PROJECT | {_name(top)}
    named = {module.__name__.partition(".")[0] for module in own_modules()}
    while left:
        current = left.pop()
        inside = [Path(place) for place in getattr(current, "__path__", ())]
        paths = {
            f"{_name(current)}/{path.relative_to(of)}": path for of in inside for path in of.rglob("*.py")
        }
        if not inside and getattr(current, "__file__", None):
            paths = {_name(current): Path(str(current.__file__))}
        for name, path in sorted(paths.items()):
            found[name] = file_digest(path)
            new = sorted(_imported(path) - seen)
            seen |= set(new)
            near = filter(None, map(_module, new))
            left += [
                other for other in near if other.__name__ in named or (folder and _place(other) == folder)
            ]
    return found


def _module(name: str) -> ModuleType | None:
    """A module or package of the first level; if nothing has imported it yet, with its files only."""
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return sys.modules.get(name)
    module = ModuleType(name)
    if spec.has_location:
        module.__file__ = spec.origin
    if spec.submodule_search_locations is not None:
        module.__path__ = list(spec.submodule_search_locations)
    return module


def _place(module: ModuleType) -> Path | None:
    """The folder in which a module or package lies; None: of installed software."""
    path = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
    folder = None if path is None else Path(str(path)).parent
    installed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")}
    return None if folder in installed else folder


def _imported(path: Path) -> set[str]:
    """The packages and modules that a file imports, anywhere in it, but for relative ones."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # of a package, but imported by nothing
        return set()
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
