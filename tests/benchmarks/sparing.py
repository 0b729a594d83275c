"""Runs of the training command without what most tests do not look at, in a third of the CPU time.

Half of a small run's time goes into pictures, and a quarter into other processes whose answer stays the same:
whether the HDF5 library survives the data file, and what git says of this checkout. Then a seventh goes into
the data file's checksums, and a tenth into the engine's trial of a network.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.core import execute
from benchmarks.core.code_version import commit
from benchmarks.reporting import pictures, plots
from dataset.cli import run
from dataset.store.probe import probe
from dataset.store.validate import check_columns
from pfl_ext.engine import cohort
from pfl_ext.engine.cpu.joining import Joined
from pfl_ext.engine.probe import fusable
from pfl_ext.models.classifier import ImageClassifier

PICTURES = ("training_curve", "privacy_curves", "per_class_bars", "per_user_violins", "bars")
"""What `plots` draws of a run."""
OF_IMAGES = ("masks", "boxes")
"""What `pictures` draws."""


def once_changed(look: Callable[[Path], None]) -> Callable[[Path], None]:
    """As ``look``, but a file is looked at again only once it has changed."""

    @functools.cache
    def looked(path: Path, *_: int) -> None:
        look(path)

    def call(path: Path) -> None:
        found = path.stat()
        looked(path, found.st_ino, found.st_size, found.st_mtime_ns)

    return call


@functools.cache
def spared(draw: Callable[..., None]) -> Callable[..., None]:
    """A function that does nothing, and takes what ``draw`` takes."""
    signature = inspect.signature(draw)

    def call(*words: Any, **more: Any) -> None:
        signature.bind(*words, **more)

    return call


VERDICTS: dict[object, bool] = {}
"""Whether the engine trains networks in groups, by `form`."""


def form(model: ImageClassifier) -> object:
    """What two networks have in common that compute alike, whatever their weights."""
    layers = list(model.backbone.modules())
    traced = [layer._run.__code__ for layer in layers if isinstance(layer, Joined)]
    return (
        tuple(type(layer) for layer in layers),
        tuple(code.co_code + repr((code.co_names, code.co_consts)).encode() for code in traced),
        tuple((name, p.shape, p.requires_grad) for name, p in model.backbone.named_parameters()),
        (repr(model.backbone), model.input_shape, model.memory_format, model.mean.device),
    )


def fusable_once(model: ImageClassifier) -> bool:
    """As `fusable`, which takes a tenth of a small run, but each `form` is tried out once."""
    key = form(model)
    if key not in VERDICTS:
        VERDICTS[key] = fusable(model)
    return VERDICTS[key]


probe_changed, columns_changed = once_changed(probe), once_changed(check_columns)
commit_once = functools.cache(commit)


@contextlib.contextmanager
def sparingly(draw: bool = False) -> Iterator[None]:
    """Within, this process's runs ask others once, and draw only if a test looks at the pictures."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(execute, "probe", probe_changed))
        stack.enter_context(mock.patch.object(execute, "check_columns", columns_changed))
        stack.enter_context(mock.patch.object(execute, "commit", commit_once))
        stack.enter_context(mock.patch.object(cohort, "fusable", fusable_once))
        for module, names in () if draw else ((plots, PICTURES), (pictures, OF_IMAGES)):
            for name in names:
                stack.enter_context(mock.patch.object(module, name, spared(getattr(module, name))))
        yield


def run_into(
    main: Callable[[Sequence[str]], None], directory: Path, *argv: str, code: int = 0, draw: bool = False
) -> Path:
    """Run a training command, which must end with this code, `sparingly`; the run directory."""
    with sparingly(draw):
        assert run(main, [f"--run_dir={directory}", *argv]) == code
    return directory
