"""Which network a shipped fine-tuning setting trains: its own, or one whose weights need no download."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.core.config.benchmark import AnyRun, Benchmark
from benchmarks.core.config.trees import read_yaml
from benchmarks.core.run_directory import has_begun
from pfl_ext.models.decoders import encoder_of
from pfl_ext.models.download import Unreachable
from pfl_ext.models.pretrained import Source, source_of
from pfl_ext.workers.distributed import from_main, is_main

SUBSTITUTE = "efficientnet_lite0"
"""The network whose ImageNet weights `requirements.txt` installs."""
CHOICES = frozenset(("model.arch", "model.normalisation", "model.weights_sha256", "weights"))
"""Arguments by which a user chooses the network, its first weights or its input."""


def substitute_for(arch: str) -> str:
    """`SUBSTITUTE`, with the decoder of this network if it has one."""
    return arch.removesuffix(encoder_of(arch)) + SUBSTITUTE


def substitute_words(arch: str) -> list[str]:
    """The arguments that choose the network that takes the place of this one."""
    return [f"--model.arch={substitute_for(arch)}", "--model.normalisation=efficientnet_lite"]


def network_words(
    benchmark: Benchmark[Any],
    argv: Sequence[str],
    directories: Callable[[AnyRun], Iterable[Path]],
    run: AnyRun | None = None,
) -> list[str]:
    """The arguments that fix the network of a pretrained run; none where the user's own words or YAML do.

    A shipped setting has its own network. `SUBSTITUTE`, with the same decoder if there is one, takes its
    place, and a line says so, where its weights cannot be downloaded. A run that has begun keeps the network
    with which it began. Worker 0 decides, and the others follow.

    Args:
        benchmark: whose command line it is.
        argv: the arguments of the run, without the network.
        directories: from the run with one of the two networks, where such a run may have begun.
        run: what the arguments ask for, where they have been read.

    Raises:
        ValueError: when there are no weights for either network.
    """
    asked = run or benchmark.parse(argv)
    arch = asked.config.model.arch
    source = source_of(arch) if asked.config.model.pretrained else None
    if source is None:
        return []
    words = benchmark.words(argv)
    if words.get("config", benchmark.default) not in benchmark.settings or CHOICES & set(words):
        return []
    other = substitute_for(arch)

    def choice() -> str:
        substituted = benchmark.parse([*argv, *substitute_words(arch)])
        places = (*directories(asked), *directories(substituted))
        return _begun(arch, other, places) or _reachable(arch, other, source)

    chosen = from_main(choice() if is_main() else None)
    return substitute_words(arch) if chosen == other else [f"--model.arch={chosen}"]


def _begun(arch: str, other: str, directories: Iterable[Path]) -> str | None:
    """The one of the two networks that a run in these directories has begun with; None: there is none."""
    for directory in directories:
        if not has_begun(directory):
            continue
        try:
            begun = str(read_yaml(directory / "config.yaml")["model"]["arch"])
        except (ValueError, OSError, KeyError, TypeError):
            continue  # it is damaged, and the run is refused for it later
        if begun == other != arch:
            print(
                f"{directory} has a run that used {other} instead of {arch}: continuing with it", flush=True
            )
        if begun in (arch, other):
            return begun
    return None


def _reachable(arch: str, substitute: str, source: Source) -> str:
    """The network whose weights this machine has or can download; a line says so if it is not ``arch``."""
    try:
        source.path()
    except Unreachable as fault:
        other = source_of(SUBSTITUTE)
        assert other is not None, "it is in the list"
        try:
            other.path()
        except ValueError as fault_of_other:
            raise ValueError(f"{fault}; for {SUBSTITUTE} itself, {fault_of_other}") from fault
        print(
            f"{fault.what}: using {substitute} with the {other.description} ({other.licence}) instead; "
            f"this run cannot be compared with the paper's row, which has {arch} (--weights "
            f"{source.name} trains {arch})",
            flush=True,
        )
        return substitute
    return arch
