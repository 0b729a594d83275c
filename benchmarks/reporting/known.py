"""The benchmarks whose runs can be read: those of this project, and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.config.sections import BENCHMARKS, config_modules
from benchmarks.core.experiment import Experiment
from dataset.files import imported, own_modules

AnyExperiment = type[Experiment[Any]]


class Known(NamedTuple):
    """A benchmark, and what it trains."""

    name: str
    """The name of the folder or the module."""
    benchmark: Benchmark[Any]
    experiment: Callable[[], AnyExperiment]
    """Imports the training, which takes time, only when it is called."""


def of_project() -> Iterator[Known]:
    """The benchmarks in a ``config.py``. One that cannot be imported has no runs here."""
    for module in config_modules():
        name = module.removesuffix(".config")
        with suppress(ValueError):
            for value in vars(imported(module)).values():
                if isinstance(value, Benchmark):
                    yield Known(name, value, partial(_trained_of, f"{name}.train", value))


def of_own_modules() -> Iterator[Known]:
    """The benchmarks in the modules that FL_IMPORT names.

    Raises:
        ValueError: when one of these cannot be imported.
    """
    for module in own_modules():
        yield from _trained_in(module.__name__)


def of_train_modules() -> Iterator[Known]:
    """The benchmarks whose folder has a ``train.py`` and no ``config.py``."""
    for path in sorted((*BENCHMARKS.glob("*/train.py"), *BENCHMARKS.glob("*/*/train.py"))):
        if not path.with_name("config.py").exists():
            with suppress(ValueError):
                yield from _trained_in(
                    ".".join(("benchmarks", *path.relative_to(BENCHMARKS).with_suffix("").parts))
                )


def _trained_of(module: str, benchmark: Benchmark[Any]) -> AnyExperiment:
    """What a training module trains for a benchmark.

    Raises:
        ValueError: one line, when it does not say.
    """
    named: AnyExperiment | None = getattr(imported(module), "EXPERIMENT", None)
    if named is not None:
        return named
    for known in _trained_in(module):
        if known.benchmark is benchmark:
            return known.experiment()
    raise ValueError(f"{module} has no Experiment with this benchmark: set EXPERIMENT there to your class")


def _trained_in(module: str) -> Iterator[Known]:
    """What a module defines or imports: an `Experiment` with a benchmark of its own."""
    for value in vars(imported(module)).values():
        if isinstance(value, type) and issubclass(value, Experiment):
            benchmark = vars(value).get("benchmark")
            if isinstance(benchmark, Benchmark):
                yield Known(module.removesuffix(".train"), benchmark, partial(_itself, value))


def _itself(experiment: AnyExperiment) -> AnyExperiment:
    return experiment
