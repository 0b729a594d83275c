"""Partitions that are drawn from the classes of the images, by name.

A new kind is one file in this folder with a function under ``@drawn("name")``. ``--partition name=NUMBER`` of
a data set's command then draws it, and the data set's file holds it as ``name-NUMBER-seed-SEED``. The name
``name-NUMBER-clients-CLIENTS-seed-SEED`` contains everything that is needed to draw a partition of given
images (`Recipe`), so a file need not hold it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dataset.arrays import IntArray
from dataset.files import import_all, module_in_execution
from dataset.store.annotations import LabelMatrix, offsets_of
from dataset.store.index import PartitionIndex, check_dealt


@dataclass(frozen=True)
class Images:
    """Further properties of a file's images, besides their class.

    Attributes:
        present: the classes that each image contains, ``[N, K]``.
        ids: the images' ids, ``[N]``.
        users: the images' owners, ``[N]``.
    """

    present: LabelMatrix
    ids: Sequence[str]
    users: Sequence[str]


@dataclass(frozen=True)
class Drawing:
    """The arguments from which a partition is drawn.

    Attributes:
        classes: the classes of the N images, ``[N]``.
        seed: the partition is a function of it and of the other arguments.
        num_clients: the number of clients.
        images_per_client: the number of images of each client, if the kind does not decide that.
        images: further properties of the images, if they are those of a file.
    """

    classes: IntArray
    seed: int
    num_clients: int
    images_per_client: int
    images: Images | None = None


Drawer = Callable[[Drawing, float], PartitionIndex]
"""Draws a partition, given the number of its kind, such as dirichlet's alpha or the shards of a client. A
kind without a number gets 0."""
MAX_NUMBER = 1e100
"""Largest number of a kind, far beyond any use; its products with a number of classes are finite."""
_DRAWERS: dict[str, Drawer] = {}
registered_by: dict[str, str] = {}
"""The module that registered each kind of partition, which may be defined in another."""
_WITHOUT_NUMBER: set[str] = set()
_OF_ANY: set[str] = set()
SEED_OF_RUN = "-seed-run"
"""How the name of a partition ends whose seed is the run's."""
_WHOLE_NAME = re.compile(r"([a-z-]+?)(?:-([0-9][0-9.e+-]*))?-clients-([0-9]{1,9})-seed-([0-9]{1,19})")


def drawn(name: str, *, numbered: bool = True, of_any: bool = False) -> Callable[[Drawer], Drawer]:
    """Decorator of a function that draws a partition: ``--partition`` chooses it by this name.

    Args:
        name: the name of the kind.
        numbered: whether the kind has a number.
        of_any: whether it also deals images whose masks or boxes have no class; their number in
            `Drawing.classes` is then -1.
    """

    def decorate(drawer: Drawer) -> Drawer:
        if _DRAWERS.setdefault(name, drawer) is not drawer:
            raise ValueError(f"there are two kinds of partition named {name}: rename one")
        registered_by[name] = module_in_execution()
        if not numbered:
            _WITHOUT_NUMBER.add(name)
        if of_any:
            _OF_ANY.add(name)
        return drawer

    return decorate


def drawers() -> Mapping[str, Drawer]:
    """The kinds of partition by name, from the files of this folder."""
    import_all("dataset.partitions")
    return dict(sorted(_DRAWERS.items()))


def deals_any(kind: str) -> bool:
    """Whether a kind also deals images whose masks or boxes have no class."""
    return kind in drawers() and kind in _OF_ANY


def written_kinds() -> str:
    """The forms of all kinds on the command line: ``classes=NUMBER, iid, ...``."""
    return ", ".join(kind if kind in _WITHOUT_NUMBER else f"{kind}=NUMBER" for kind in drawers())


@dataclass(frozen=True)
class Recipe:
    """Everything that is needed to draw a partition of given images."""

    kind: str
    number: float
    num_clients: int
    images_per_client: int | None
    """Number of images of each client; None: an equal part of all images."""
    seed: int

    def draw(self, classes: IntArray, images: Images | None = None) -> PartitionIndex:
        """Draw the partition of images with these classes, ``[N]``.

        Raises:
            ValueError: one line, if it is impossible, or if the kind draws something else at each call.
        """
        each = self.images_per_client or len(classes) // self.num_clients
        drawing = Drawing(classes, self.seed, self.num_clients, each, images)
        before, drawer = global_state(), drawers()[self.kind]
        found = drawer(drawing, self.number)
        if global_state() != before and not _same(found, drawer(drawing, self.number)):
            raise ValueError(
                f"the partition {self.kind} draws from a global generator, so each start of a run and each "
                "worker would have other clients: draw from numpy.random.default_rng(drawing.seed)"
            )
        try:
            check_dealt(found, len(classes))
        except ValueError as fault:
            raise ValueError(f"the partition {self.name} is none: {fault}") from None
        return found

    @property
    def name(self) -> str:
        """``lda-0.5-clients-10-seed-42``; `read_name` reads it."""
        return partition_name(self.kind, self.number, self.seed, self.num_clients)

    @property
    def provenance(self) -> dict[str, str | float]:
        """What a file says of a partition that was drawn so."""
        return {"kind": self.kind, "number": self.number, "seed": self.seed}


def global_state() -> tuple[object, ...]:
    """The state of Python's and numpy's generators that all code shares."""
    numpys = np.random.get_state(legacy=False)  # noqa: NPY002  # nothing is drawn
    return random.getstate(), json.dumps(numpys, default=np.ndarray.tolist)


def _same(one: PartitionIndex, other: PartitionIndex) -> bool:
    parts = (one.rows, other.rows), (one.offsets, other.offsets)
    return list(one.user_ids) == list(other.user_ids) and all(np.array_equal(*pair) for pair in parts)


def name_for(name: str, seed: int) -> str:
    """``iid-clients-10-seed-3`` for ``iid-clients-10-seed-run`` in a run of seed 3; any other name itself.

    So each seed of an experiment has clients of its own, and their runs differ by their seed alone.
    """
    if not name.endswith(SEED_OF_RUN):
        return name
    return f"{name.removesuffix(SEED_OF_RUN)}-seed-{seed}"


def read_name(name: str) -> Recipe | None:
    """The recipe in a `Recipe.name`; None for any other text.

    Raises:
        ValueError: for a name that is almost valid: another form of the number, no client, or a number or a
            seed that is too large.
    """
    found = _WHOLE_NAME.fullmatch(name)
    if found is None or found[1] not in drawers() or (found[2] is None) != (found[1] in _WITHOUT_NUMBER):
        return None
    try:
        recipe = Recipe(found[1], float(found[2] or 0), int(found[3]), None, int(found[4]))
    except ValueError:
        return None
    if not 0 <= recipe.number <= MAX_NUMBER:
        raise ValueError(
            f"partition {name}: its number is {found[2]}; give a number from 0 to {MAX_NUMBER:g}"
        )
    if recipe.num_clients < 1 or recipe.seed >= 2**63:
        raise ValueError(f"partition {name}: give at least 1 client, and a seed below 2^63")
    if recipe.name != name:
        raise ValueError(f"write the partition {name} as {recipe.name}")
    return recipe


def parse_kinds(option: str, text: str, kind: str | None = None) -> Iterator[tuple[str, float]]:
    """The kinds and numbers in ``shards=2,iid``, or with a ``kind`` in ``0.3,1``; 0 for a kind without one.

    Raises:
        ValueError: in one line that names the option, for an unknown kind, for no number from 0 on, and for
            a text of commas alone.
    """
    parts = [*filter(None, map(str.strip, text.split(",")))]
    if text and not parts:
        raise ValueError(f"--{option} is {text!r}, which has only commas: leave it out")
    for part in parts:
        name, equals, written = (kind, "=", part) if kind else part.partition("=")
        if name not in drawers() or (name in _WITHOUT_NUMBER and equals):
            known = f"one or more of {written_kinds()}, separated by commas"
            raise ValueError(f"--{option} is {text!r}: give {known}")
        try:
            number = 0.0 if name in _WITHOUT_NUMBER else float(written)
        except ValueError:
            number = -1.0
        if not 0 <= number <= MAX_NUMBER:
            example = "0.3,1" if kind else f"{name}=1"
            limit = f"of at least 0, separated by commas, such as {example}"
            if number > MAX_NUMBER:
                limit = f"of at most {MAX_NUMBER:g}"
            raise ValueError(f"--{option} is {text!r}; give numbers {limit}")
        yield name, abs(number)  # -0 is 0


def of_parts(parts: Sequence[IntArray], names: Sequence[str] = ()) -> PartitionIndex:
    """The partition whose client i has the rows ``parts[i]``, in order, and a name, or its number as such."""
    offsets = offsets_of(np.array([*map(len, parts)]))
    rows = np.concatenate([np.sort(part) for part in parts])
    return PartitionIndex(names or [str(client) for client in range(len(parts))], rows, offsets)


def of_owners(owner: IntArray, clients: int) -> PartitionIndex:
    """The partition in which image i belongs to client ``owner[i]``, ``[N]``; -1: to no client."""
    rows = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    offsets = offsets_of(np.bincount(owner[rows], minlength=clients))
    return PartitionIndex([str(client) for client in range(clients)], rows, offsets)


def check_parameter(value: float) -> None:
    """Raise ValueError if a Dirichlet distribution cannot have this parameter."""
    if not value > 0:
        raise ValueError(f"the parameter of a Dirichlet distribution is {value:g}; give a number above 0")


def whole(number: float, kind: str) -> int:
    """The number of a kind whose number counts something; ValueError for any that is not 1, 2, ..."""
    if number < 1 or number != int(number):
        raise ValueError(f"{kind} is {number:g}: give a whole number of at least 1")
    return int(number)


def partition_name(kind: str, number: float, seed: int, num_clients: int | None = None) -> str:
    """``dirichlet-total-0.3-seed-0``: different values have different names."""
    value = "" if kind in _WITHOUT_NUMBER else "-" + repr(float(number)).removesuffix(".0")
    clients = "" if num_clients is None else f"-clients-{num_clients}"
    return f"{kind}{value}{clients}-seed-{seed}"
