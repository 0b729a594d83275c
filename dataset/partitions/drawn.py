"""Partitions that are drawn from the classes of the images, by name.

A new one is one file in this folder with a function under ``@drawn("name")``: ``--partition name=NUMBER`` of
a data set's command then makes it, and the file of the data set holds it as ``name-NUMBER-seed-SEED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dataset.files import import_all
from dataset.store.annotations import IntArray
from dataset.store.index import PartitionIndex


@dataclass(frozen=True)
class Drawing:
    """What a partition is drawn from.

    Attributes:
        classes: of the N images, ``[N]``.
        seed: the partition is a function of it and of the other arguments.
        num_clients: how many clients there are to be.
        images_per_client: of each client, where its kind does not decide that.
    """

    classes: IntArray
    seed: int
    num_clients: int
    images_per_client: int


Drawer = Callable[[Drawing, float], PartitionIndex]
"""The partition, given the one number that its kind has: dirichlet's alpha, or the shards of a client."""
MAX_NUMBER = 1e100
"""Far beyond any use; its products with a number of classes stay finite."""
_DRAWERS: dict[str, Drawer] = {}


def drawn(name: str) -> Callable[[Drawer], Drawer]:
    """Decorator of a function that draws a partition: ``--partition`` chooses it by this name."""

    def decorate(drawer: Drawer) -> Drawer:
        if _DRAWERS.setdefault(name, drawer) is not drawer:
            raise ValueError(f"there are two --partition {name}")
        return drawer

    return decorate


def drawers() -> Mapping[str, Drawer]:
    """All kinds by name, from the files of this folder."""
    import_all("dataset.partitions")
    return dict(sorted(_DRAWERS.items()))


def parse_kinds(option: str, text: str, kind: str | None = None) -> Iterator[tuple[str, float]]:
    """The kinds and numbers in ``shards=2,shards=4``, or with a ``kind`` in ``0.3,1``.

    Raises:
        ValueError: in one line that names the option, for an unknown kind, for no number from 0 on, and for
            a text of commas alone.
    """
    parts = [*filter(None, map(str.strip, text.split(",")))]
    if text and not parts:
        raise ValueError(f"--{option} is {text!r}, which names none: leave it out")
    for part in parts:
        name, _, written = (kind, "", part) if kind else part.partition("=")
        if name not in drawers():
            known = ", ".join(f"{known}=NUMBER" for known in drawers())
            raise ValueError(f"--{option} is {text!r}: give any of {known}, with commas between them")
        try:
            number = float(written)
        except ValueError:
            number = -1.0
        if not 0 <= number <= MAX_NUMBER:
            example = "0.3,1" if kind else f"{name}=1"
            limit = f"from 0 on with commas between them: {example}"
            if number > MAX_NUMBER:
                limit = f"up to {MAX_NUMBER:g}"
            raise ValueError(f"--{option} is {text!r}; give numbers {limit}")
        yield name, abs(number)  # -0 is 0


def partition_name(kind: str, number: float, seed: int) -> str:
    """``dirichlet-total-0.3-seed-0``: different values have different names."""
    return f"{kind}-{repr(float(number)).removesuffix('.0')}-seed-{seed}"
