"""Say which ImageNet weights packages hold, once they are verified: where, checksum, licence, input.

python -m benchmarks.core.show_weights
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.core.commands import command_parser
from dataset.cli import run as run_command
from dataset.files import file_digest
from pfl_ext.models.pretrained import PACKAGED


def main(argv: Sequence[str]) -> None:
    """Verify the weights files of installed packages, and say what is known of them."""
    command_parser("core.show_weights", main.__doc__).parse_args(argv)
    for arch, source in PACKAGED.items():
        file = source.path()
        print(
            f"--model.arch={arch} --model.normalisation={source.normalisation} --model.pretrained=true\n"
            f"  {source.description}\n  file: {file}\n  SHA-256: {file_digest(file)}, as expected\n"
            f"  licence: {source.licence}"
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
