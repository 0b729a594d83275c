"""A checked dataclass from a tree of plain values, or one line that says what is wrong with it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

Node = TypeVar("Node")


class Leaf(NamedTuple):
    """One key of a config."""

    key: str
    """Its dotted name."""
    hint: Any
    """Its type."""
    metadata: Mapping[Any, Any]
    """What is said of the field, and of the sections that it stands in."""


def section_in(hint: Any) -> Any:
    """The dataclass in a type, which may be that or None; None where there is none."""
    return next((part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)), None)


def leaves(kind: Any, prefix: str = "") -> Iterator[Leaf]:
    """Every key of a config's type, those of sections that may be absent among them."""
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):
        key, section = prefix + item.name, section_in(hints[item.name])
        if section is None:
            yield Leaf(key, hints[item.name], item.metadata)
        else:
            for leaf in leaves(section, f"{key}."):
                yield leaf._replace(metadata={**leaf.metadata, **item.metadata})


def _explain(fault: Any, kind: Any) -> str:
    """One fault of pydantic's, in one line that names the key and what to do."""
    name = ".".join(map(str, fault["loc"]))
    if fault["type"] == "value_error":  # a section's own check, which names the key
        return str(fault["ctx"]["error"])
    if fault["type"] in ("missing", "missing_argument"):  # its input is all that surrounds the key
        return f"{name} is missing"
    if fault["type"] != "unexpected_keyword_argument":
        return f"{name} is {fault['input']!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}"
    for section in fault["loc"][:-1]:
        kind = section_in(get_type_hints(kind)[section])
    known = [f.name for f in dataclasses.fields(kind)]
    near = difflib.get_close_matches(str(fault["loc"][-1]), known, 1)
    prefix = "".join(f"{part}." for part in fault["loc"][:-1])
    return f"there is no config key {name}; " + (
        f"did you mean {prefix}{near[0]}?" if near else f"the keys here are {', '.join(known)}"
    )


def build(kind: type[Node], tree: Mapping[str, Any], where: str) -> Node:
    """A dataclass from a tree: every key must be a field, every value of its type.

    Raises:
        ValueError: one line that names the first wrong key, what it may be, and ``where`` it stands.
    """
    try:
        return TypeAdapter(kind).validate_python(dict(tree))
    except ValidationError as faults:
        raise ValueError(f"{where}: {_explain(faults.errors()[0], kind)}") from faults
