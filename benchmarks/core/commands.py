"""The command lines that are no training's: reports, figures, measurements."""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter

from dataset.cli import OneLineParser


class _Help(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """The text as it is written, and each option's default."""


def command_parser(module: str, text: str | None) -> OneLineParser:
    """The parser of ``python -m benchmarks.MODULE``, whose help begins with a text."""
    prog = f"python -m benchmarks.{module}"
    return OneLineParser(prog=prog, description=text, formatter_class=_Help, allow_abbrev=False)
