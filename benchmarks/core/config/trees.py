"""Configs as trees of plain values: reading them from YAML, laying one over another, dotted keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Tree = dict[str, Any]


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


def put(tree: Tree, key: str, value: Any) -> None:
    """Set the leaf of a dotted key."""
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[leaf] = value


def without(tree: Tree, keys: Sequence[str], prefix: str = "") -> Tree:
    """A tree without some dotted keys or whole sections."""
    out: Tree = {}
    for key, value in tree.items():
        if f"{prefix}{key}" not in keys:
            out[key] = without(value, keys, f"{prefix}{key}.") if isinstance(value, dict) else value
    return out


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
                    None, None, f"the key {key!r} stands twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Tree:
    """A YAML mapping.

    :raises ValueError: when the file is missing, is not YAML, or is not a mapping.
    """
    try:
        tree = yaml.load(path.read_text(), _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        raise ValueError(f"{path} is not readable YAML: {fault}") from fault
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold a mapping of config keys, not a {type(tree).__name__}")
    return tree
