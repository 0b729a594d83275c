"""The part of a training command's help on the options that things chosen by name declare themselves."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, HelpFormatter
from collections.abc import Callable
from dataclasses import MISSING, fields
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from benchmarks.core.config.choices import choosing_sections


def options_help(config: type, describe: Callable[[Any], None], layout: Callable[..., HelpFormatter]) -> str:
    """A group of options for each thing that declares some, with their descriptions and defaults.

    Args:
        config: the type of a benchmark's config.
        describe: gives the fields of a dataclass the descriptions of the classes above it.
        layout: argparse's formatter.
    """
    groups: list[str] = []
    for section_name, section in choosing_sections(config):
        registry = section.registry
        same: dict[type, list[str]] = {}
        for name in registry.names():
            kind = registry[name].options
            if not issubclass(section, kind) and fields(kind):
                same.setdefault(kind, []).append(name)
        for kind, names in same.items():
            describe(kind)
            parser = ArgumentParser(usage=SUPPRESS, add_help=False, formatter_class=layout)
            group = parser.add_argument_group(f"where {registry.key} is {' or '.join(names)}")
            hints = get_type_hints(kind, include_extras=True)
            for item in fields(kind):
                info = kind.__pydantic_fields__[item.name]  # type: ignore[attr-defined]
                default = info.default if item.default is not MISSING else "none: it must be given"
                text = " ".join(f"{info.description} (default: {default})".replace("%", "%%").split())
                word = f"--{section_name}.options.{item.name}"
                group.add_argument(word, metavar=_shown(hints[item.name]), help=text)
            groups.append(parser.format_help())
    return "\n".join(groups)


def _shown(hint: Any) -> str:
    """A type as the rest of the help shows it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _shown(parts[0])
    if origin is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin in (Union, UnionType):
        return "{" + ",".join(_shown(part) for part in parts) + "}"
    return "none" if hint is type(None) else str(getattr(hint, "__name__", hint))
