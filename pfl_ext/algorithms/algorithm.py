"""What every algorithm offers, and the algorithms by name.

A new algorithm is one file in this folder with a class under ``@register("name")``: it is then chosen by
``federated.algorithm: name``, and each field of its ``options`` is set as ``federated.options.FIELD``, in
YAML or on the command line. The oldest algorithms have their options among the keys of ``federated`` itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.models.classifier import ImageClassifier

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
"""For dataclasses of options: no other keys, and no numbers that are none."""
Circumstance = Literal["privacy", "postprocessors", "workers", "replacement", "proportional"]
"""What an algorithm may have to refuse: private training of either kind; pfl's postprocessors other than
a weighting; several workers; users who come twice in a cohort; users drawn in proportion to their images."""
Refusals = Mapping[Circumstance, str]
"""The line that a user reads, by what is refused."""
PRIVACY_NOT_ARGUED: Refusals = {
    "privacy": "nobody has argued how much one user can change what this algorithm releases: choose "
    "algorithm fedavg or fedprox for private training"
}


def refuse(refusals: Refusals, **circumstances: bool) -> None:
    """Refuse the first of these circumstances that holds and has a refusal.

    Raises:
        ValueError: the refusal.
    """
    for name, reason in refusals.items():
        if circumstances.get(name):
            raise ValueError(reason)


class UserState(Protocol):
    """What an algorithm goes on from besides the model and the server's optimiser."""

    def tensors(self) -> dict[str, Tensor]:
        """For the checkpoint that is about to be written."""
        ...

    def saved(self) -> None:
        """That checkpoint has taken its name."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the tensors of a checkpoint."""
        ...


@checked_dataclass(frozen=True, config=STRICT)
class NoOptions:
    """The options of an algorithm that has none."""


@dataclass(frozen=True)
class Setup:
    """The run that an algorithm is built for."""

    options: Any
    """An instance of the algorithm's ``options``."""
    num_rounds: int
    cohort_size: int
    by_images: bool
    """Whether users weigh by their images; else they weigh alike."""
    module: ImageClassifier
    users: FederatedImageDataset
    folder: Path | None = None
    """Where the run's checkpoints lie; None: the state of users goes to temporary files."""


class AlgorithmClass(Protocol):
    """A class that is registered: see `pfl_ext.algorithms.on_pfl.OnPfl`."""

    options: ClassVar[type]
    refusals: ClassVar[Refusals]
    files: ClassVar[tuple[str, ...]]

    @classmethod
    def resolved(cls, options: Any) -> dict[str, Any]:
        """Values of options that are left open, by key."""
        ...

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what cannot be trained, before anything is written."""
        ...

    @classmethod
    def build(cls, setup: Setup, **common: Any) -> tuple[Any, Any]:
        """The algorithm and its parameters, from those that all algorithms have."""
        ...


_REGISTERED: dict[str, Any] = {}
Registered = TypeVar("Registered", bound=type[AlgorithmClass])


def register(name: str) -> Callable[[Registered], Registered]:
    """Decorator of an algorithm's class: ``federated.algorithm`` chooses it by this name."""

    def decorate(kind: Registered) -> Registered:
        assert _REGISTERED.setdefault(name, kind) is kind, name
        return kind

    return decorate


@cache
def _import_all() -> None:
    package = importlib.import_module("pfl_ext.algorithms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def names() -> Sequence[str]:
    """Of all algorithms."""
    _import_all()
    return sorted(_REGISTERED)


def algorithm_class(name: str) -> type[AlgorithmClass]:
    """The algorithm of this name.

    Raises:
        ValueError: when there is none.
    """
    if name not in names():
        raise ValueError(f"federated.algorithm is {name!r}: choose one of {', '.join(names())}")
    kind: type[AlgorithmClass] = _REGISTERED[name]
    return kind


def option_keys() -> Iterator[tuple[str, Sequence[str]]]:
    """Each option's key, and the names of the algorithms that read it."""
    of_all = {name: {field.name for field in fields(_REGISTERED[name].options)} for name in names()}
    for key in sorted(set().union(*of_all.values())):
        yield key, [name for name, keys in of_all.items() if key in keys]
