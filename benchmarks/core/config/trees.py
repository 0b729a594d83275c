"""Configs as trees of plain values: read from YAML, laid one over another, by dotted keys; and a checked
dataclass from a tree, or one line that says what is wrong with it."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

Node = TypeVar("Node")
Tree = dict[str, Any]
NOTHING = ("none", "null")
"""Words for None where a field may be empty."""


def merge(base: Tree, over: Tree) -> Tree:
    """``over`` laid over ``base``, section by section."""
    out = dict(base)
    for key, value in over.items():
        out[key] = (
            merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
        )
    return out


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree by their dotted keys."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping)
        out |= dotted(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return out


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for every dotted key that differs."""
    before, after = dotted(old), dotted(new)
    keys = [key for key in sorted({**before, **after}) if before.get(key) != after.get(key)]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys]


def put(tree: Tree, key: str, value: Any) -> None:
    """Set the leaf of a dotted key."""
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[leaf] = value


def without(tree: Mapping[str, Any], keys: Sequence[str], prefix: str = "") -> Tree:
    """A tree without some dotted keys or whole sections."""
    out: Tree = {}
    for key, value in tree.items():
        if f"{prefix}{key}" not in keys:
            out[key] = without(value, keys, f"{prefix}{key}.") if isinstance(value, dict) else value
    return out


def as_word(value: Any) -> str:
    """A value as it is given on a command line."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML in which a repeated key and an alias (ten lines of them make gigabytes) are errors."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed here", self.get_mark())
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """What a YAML text holds; libyaml would be faster, but ends the process at 100,000 nested brackets."""
    return yaml.load(text, _UniqueKeyLoader)


def read_yaml(path: Path) -> Tree:
    """A YAML mapping.

    Raises:
        ValueError: when the file is missing, is not YAML, or is not a mapping.
    """
    try:
        tree = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        raise ValueError(f"{path} is not valid YAML: {fault}") from fault
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold a mapping of config keys, not a {type(tree).__name__}")
    return tree


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


def leaves(kind: Any, prefix: str = "") -> tuple[Leaf, ...]:
    """Every key of a config's type, those of sections that may be absent among them."""
    return _leaves(kind, prefix)


_hints = cache(get_type_hints)
"""The types of a dataclass's fields, which take milliseconds to find."""


@cache
def _leaves(kind: Any, prefix: str) -> tuple[Leaf, ...]:
    hints, out = _hints(kind), list[Leaf]()
    for item in dataclasses.fields(kind):
        key, section = prefix + item.name, section_in(hints[item.name])
        if section is None:
            out.append(Leaf(key, hints[item.name], item.metadata))
        else:
            inner = _leaves(section, f"{key}.")
            out += [leaf._replace(metadata={**leaf.metadata, **item.metadata}) for leaf in inner]
    return tuple(out)


def _takes(kind: type, hint: Any) -> bool:
    """Whether a type is this one or has it among its parts."""
    return hint is kind or any(_takes(kind, part) for part in get_args(hint))


@cache
def _numbers(kind: Any) -> tuple[str, ...]:
    """The keys of a config's type whose values are numbers, each with a dot at its end."""
    return tuple(
        f"{leaf.key}." for leaf in leaves(kind) if _takes(int, leaf.hint) or _takes(float, leaf.hint)
    )


def _explain(fault: Any, kind: Any, prefix: str) -> str:
    """One fault of pydantic's, in one line that names the key and what to do."""
    name = (prefix + ".".join(map(str, fault["loc"]))).removesuffix(".")
    if fault["type"] == "value_error":  # a section's own check, which names the key
        return str(fault["ctx"]["error"])
    if fault["type"] in ("missing", "missing_argument"):  # its input is all that surrounds the key
        return f"{name} is missing"
    if fault["type"] in ("dict_type", "mapping_type", "dataclass_type"):
        return f"{name} is {fault['input']!r}, but has keys of its own: give {name}.KEY=VALUE"
    if fault["type"] != "unexpected_keyword_argument":
        return f"{name} is {fault['input']!r}: {fault['msg'][0].lower()}{fault['msg'][1:]}"
    for section in fault["loc"][:-1]:
        kind = section_in(_hints(kind)[section])
    known = [f.name for f in dataclasses.fields(kind)]
    near = difflib.get_close_matches(str(fault["loc"][-1]), known, 1)
    section = "".join(f"{part}." for part in fault["loc"][:-1])
    return f"there is no config key {name}; " + (
        f"did you mean {prefix}{section}{near[0]}?" if near else f"the keys here are {', '.join(known)}"
    )


def _with_nothing(kind: Any, tree: Mapping[str, Any]) -> Tree:
    """A tree with None for the words that mean it where a field may be empty, and with the word ``none`` for
    None where that is a choice (as of ``augment.flip``)."""
    hints, out = _hints(kind), dict(tree)
    for key, value in tree.items():
        hint = hints.get(key)
        section, choices = section_in(hint), get_args(hint)
        if section is not None and isinstance(value, Mapping):
            out[key] = _with_nothing(section, value)
        elif "none" in choices:
            out[key] = "none" if value is None else value
        elif type(None) in choices and isinstance(value, str) and value.lower() in NOTHING:
            out[key] = None
    return out


def build(kind: type[Node], tree: Any, where: str, prefix: str = "") -> Node:
    """A dataclass from a tree: every key must be a field, every value of its type.

    Args:
        kind: the dataclass.
        tree: its values by key, or words for them.
        where: the place that the tree is from, for the error.
        prefix: what stands before a key there: ``--`` on a command line.

    Raises:
        ValueError: one line that names the first wrong key and what it may be.
    """
    known: Any = kind
    for key, value in dotted(tree if isinstance(tree, Mapping) else {}).items():
        if isinstance(value, bool) and f"{key}.".startswith(_numbers(known)):  # pydantic takes true for 1
            raise ValueError(f"{where}: {prefix}{key} is {as_word(value)}: give a number")
    try:
        return TypeAdapter(kind).validate_python(
            _with_nothing(kind, tree) if isinstance(tree, Mapping) else tree
        )
    except ValidationError as faults:
        raise ValueError(f"{where}: {_explain(faults.errors()[0], kind, prefix)}") from faults
