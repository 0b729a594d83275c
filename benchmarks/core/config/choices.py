"""The sections of a config in which one thing is chosen by its name, and the options of what is chosen."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import get_type_hints

from benchmarks.core.config.sections import ChoosingSection
from benchmarks.core.config.trees import Tree, section_in


@cache
def choosing_sections(config: type) -> tuple[tuple[str, type[ChoosingSection]], ...]:
    """The name and the type of each such section of a benchmark's config."""
    sections = ((name, section_in(hint)) for name, hint in get_type_hints(config).items())
    return tuple((name, s) for name, s in sections if s is not None and issubclass(s, ChoosingSection))


def without_others_options(config: type, tree: Tree, over: Tree) -> Tree:
    """A tree without the options of what it chooses, where ``over`` chooses something else that lacks them.

    So ``--config fedper --federated.algorithm fedavg`` is no mistake. What both have, such as held_out of
    fedper and fedrep, stays.

    Args:
        config: the type of the benchmark's config.
        tree: what is known so far.
        over: what will be laid over it.
    """
    out = dict(tree)
    for name, section in choosing_sections(config):
        key, mine, theirs = section.registry.key.partition(".")[2], tree.get(name), over.get(name)
        if (
            not isinstance(mine, dict)
            or not isinstance(theirs, dict)
            or not isinstance(mine.get("options"), dict)
        ):
            continue
        chosen = theirs.get(key)
        if chosen is None or mine.get(key) in (None, chosen) or chosen not in section.registry.names():
            continue
        kind = section.registry[chosen].options
        known = set() if issubclass(section, kind) else {item.name for item in fields(kind)}
        kept = {option: value for option, value in mine["options"].items() if option in known}
        out[name] = {**mine, "options": kept or None}
    return out
