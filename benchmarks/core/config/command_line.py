"""Command lines by pydantic-settings: of training from a config's fields, of other commands from a dataclass.

pydantic-settings makes one argparse parser of all sections: dotted keys, ``--key value`` and ``--key=value``,
and a help text by section with the fields' own docstrings. Three things it could not do are done here: say
which key an unknown one was meant to be, take dotted keys within a field that is a mapping, and refuse a
section that is given both whole and by its keys.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from textwrap import dedent
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from pydantic import Field, create_model
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict

from benchmarks.core.config.options_help import options_help
from benchmarks.core.config.sections import Runtime, TrainingConfig
from benchmarks.core.config.trees import NOTHING, Tree, dotted, leaves, section_in

LAYOUT = partial(RawDescriptionHelpFormatter, width=112, max_help_position=44)


def _pairs(argv: Sequence[str]) -> dict[str, str]:
    """``--key value`` and ``--key=value`` pairs, the last of each key."""
    out: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ValueError(f"cannot read the argument {word!r}: write --key value or --key=value")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(_without_value(f"--{key}"))
            value = rest.pop(0)
        out[key] = value
    return out


def _without_value(option: str) -> str:
    return f"{option} needs a value: write {option} value or {option}=value"


class Options(BaseSettings):
    """The options of a training command that are no part of its config."""

    model_config = SettingsConfigDict(
        enable_decoding=False,
        cli_avoid_json=True,
        cli_parse_none_str="none",
        cli_use_class_docs_for_groups=True,
    )

    config: str
    data_path: str | None = None
    """HDF5 file that this benchmark's download_preprocess wrote."""
    run_dir: str | None = None
    """Directory of the run's files; {digest} is replaced by the config's digest. By default one in runs/."""
    weights: str | None = None
    """File of pretrained weights (.pth, .pt, .safetensors). By default the network's known weights."""
    extend: str | None = None
    """Folder of a shorter run of this config to continue (made with keep_checkpoints)."""
    resume: str = "auto"
    """auto: resume from the directory's checkpoint. never: refuse a directory in use."""
    recipe: str | None = None
    scale: str | None = None


class _Parser(ArgumentParser):
    """argparse's parser, whose errors are a `ValueError` in our words."""

    def error(self, message: str) -> NoReturn:
        option, _, reason = message.removeprefix("argument ").partition(": ")
        raise ValueError(_without_value(option) if reason == "expected one argument" else message)


def own_arguments(kind: type, argv: Sequence[str]) -> tuple[Tree, list[str]]:
    """The words of the options in a dataclass, to be checked by `build`; and each other argument, which is
    one of training's, once, as ``--key=value``.

    Raises:
        ValueError: for anything else than keys and values.
    """
    others: list[str] = []

    def parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
        found, unknown = parser.parse_known_args(words)
        others.extend(f"--{key}={value}" for key, value in _pairs(unknown).items())
        return found

    hints = get_type_hints(kind)
    fields: Tree = {item.name: (hints[item.name], item.default) for item in dataclasses.fields(kind)}
    source: CliSettingsSource[Any] = CliSettingsSource(
        create_model("Arguments", __base__=BaseSettings, **fields),
        root_parser=_Parser(allow_abbrev=False, add_help=False),
        parse_args_method=parse,
    )
    return source(args=list(argv))(), others


def describe(kind: Any) -> None:
    """Give the fields of a dataclass, and of the sections in it, their docstrings, or inherited ones.

    pydantic reads no inherited ones. It reads the others whenever a class is made, which took a tenth of the
    time in which a command starts, and only a help text shows them.
    """
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        texts |= _docstrings(each)
        for name, info in vars(each).get("__pydantic_fields__", {}).items():
            info.description = texts.get(name)
    for hint in get_type_hints(kind).values():
        section = section_in(hint)
        if section is not None:
            describe(section)


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """The docstrings of the fields in a class itself; none where its source is not known, as in Jupyter."""
    try:
        (tree,) = ast.parse(dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def _origins(hint: Any) -> list[Any]:
    return [get_origin(part) for part in (hint, *get_args(hint))]


class CommandLine:
    """The command line of a benchmark's training.

    Args:
        default: the protocol; its type says which keys there are.
        choices: descriptions of the options ``config``, ``recipe`` and ``scale``, which are the benchmark's.
    """

    def __init__(self, default: TrainingConfig, choices: Mapping[str, str]) -> None:
        kind: Any = type(default)
        self._default, self._choices = default, choices
        hints = get_type_hints(kind, include_extras=True)
        fields: Tree = {
            name: (hints[name], Field(getattr(default, name), description=info.description))
            for name, info in kind.__pydantic_fields__.items()
        }
        fields["runtime"] = (Runtime, Runtime())
        for name, text in choices.items():
            fields[name] = (str | None, Field(None, description=text))
        self._hints = {leaf.key: leaf.hint for leaf in (*leaves(kind), *leaves(Runtime, "runtime."))}
        self._open = tuple(f"{key}." for key, hint in self._hints.items() if Mapping in _origins(hint))
        self._parser = _Parser(
            usage="%(prog)s [--config NAME_OR_YAML] [--key value | --key=value] ...",
            allow_abbrev=False,
            add_help=False,
            formatter_class=LAYOUT,
        )
        self._source: CliSettingsSource[Any] = CliSettingsSource(
            create_model("Arguments", __base__=Options, **fields),
            root_parser=self._parser,
            parse_args_method=self._parse,
        )

    def _parse(self, parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
        found, unknown = parser.parse_known_args(argv)
        for key in vars(found):
            section = next((name for name in vars(found) if key.startswith(f"{name}.")), None)
            if section is not None:
                raise ValueError(f"--{key}: --{section} has already been given a value")
        for key, value in _pairs(unknown).items():
            if not key.startswith(self._open):  # what is within a mapping, no type declares
                near = _like(key, [*self._hints, *Options.model_fields])
                hint = f"did you mean {' or '.join(near)}?" if near else "--help lists the keys"
                raise ValueError(f"there is no config key {key}; {hint}")
            setattr(found, key, value)
        return found

    def parse(self, argv: Sequence[str]) -> Tree:
        """The options and keys that are given, as a tree whose leaves are words or None.

        Raises:
            ValueError: for an unknown key, a key without a value, or anything else than keys and values.
        """
        return self._values(self._source(args=list(argv))())

    def words(self, argv: Sequence[str]) -> dict[str, str]:
        """Every option and key that is given and its word, in the order in which they are given.

        Raises:
            ValueError: as `parse`.
        """
        found = dotted(self.parse(argv))
        names = dict.fromkeys(word.removeprefix("--").partition("=")[0] for word in argv)
        return {name: "none" if found[name] is None else found[name] for name in names if name in found}

    def _values(self, tree: Tree) -> Tree:
        """The tree with None for the words that mean it."""
        nothing = {key: None for key, value in tree.items() if str(value).lower() in NOTHING}
        inner = {key: self._values(value) for key, value in tree.items() if isinstance(value, dict)}
        return {**tree, **inner, **nothing}

    def help(self, text: str, program: str) -> str:
        """The help text: ``text``, then every key by section with its description and default, then the
        options of what is chosen by name."""
        kind = type(self._default)
        for each in (Options, kind, Runtime):
            describe(each)
        parser = CommandLine(self._default, self._choices)._parser
        parser.prog, parser.description = program, text
        whole = f"{parser.format_help()}\n{options_help(kind, describe, LAYOUT)}"
        return re.sub(r"(\(default:\s+)None\)", r"\1none)", whole)


def _like(key: str, known: Sequence[str]) -> Sequence[str]:
    """The known keys that a wrong one may mean. Without a section, that is any key of this name, or else any
    with this word in its name: ``rounds`` may mean ``federated.num_rounds``."""
    names = {each: each.rpartition(".")[2] for each in known}
    same = [each for each, name in names.items() if name == key]
    with_word = [each for each, name in names.items() if key in name.split("_")]
    return same or with_word or difflib.get_close_matches(key, known, 1)
