"""argparse whose complaints are one line: `dataset.command_line.run` prints it and exits with 2."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise the message, with a pointer to the help."""
        raise ValueError(f"{message}; see {self.prog} --help")
