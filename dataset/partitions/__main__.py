"""Assign a file's training images to clients, measure how unequal clients are, and store the partition.

    python -m dataset.partitions F                                        the partitions in the file
    python -m dataset.partitions F --partition lda=0.5,iid --clients 10   and partitions that would be drawn
    python -m dataset.partitions F --csv users.csv --output_file G        a copy of F with "users" from a CSV

It prints a line for each partition. With --output_dir it also writes ``statistics.json``, the figures of
`dataset.partitions.figures`, and ``clients.csv`` with the images and boxes, in all and of each class, of each
client. Training uses a partition of the file by its name (``--data.partition``). A drawn one needs no copy:
its name, such as lda-0.5-clients-10-seed-0, says how to draw it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dataset.cli import OneLineParser, input_file, output_file, output_folder, run
from dataset.files import write_json
from dataset.journal import only_writer
from dataset.partitions.clients import write_clients
from dataset.partitions.drawn import Recipe, parse_kinds, read_name, written_kinds
from dataset.partitions.of_file import (
    LOWEST,
    alike,
    default_taxonomy,
    drawn_of,
    is_lowest,
    read_csv,
    write_with,
)
from dataset.partitions.statistics import MEANING, as_text, measure
from dataset.store import probe
from dataset.store.hdf5 import DataFile


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m dataset.partitions",
        description=f"{__doc__}\n{MEANING}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path)
    written = f"draw these, with commas between them: {written_kinds()}; or KIND-NUMBER-clients-C-seed-S"
    add("--partition", default="", help=written)
    add("--clients", type=int, help="number of clients of drawn partitions (100)")
    add("--seed", type=int, help="seed of drawn partitions (0)")
    add("--csv", type=Path, help="partition with the columns image_id,user_id; it gets the file's name")
    add("--taxonomy", help="the annotation that holds the classes (labels, or else the file's first)")
    add("--output_dir", type=Path, help="folder for statistics.json, clients.csv and figures")
    add("--output_file", type=Path, help="copy of the file, with the new partitions")
    add("--overwrite", action="store_true", help="replace an existing output file; it may be the file itself")
    arguments = parser.read(argv)
    if not 0 <= (arguments.seed or 0) < 2**63:
        raise ValueError(f"--seed is {arguments.seed}; give a number from 0 to {2**63 - 1}")
    if arguments.clients is not None and arguments.clients < 1:
        raise ValueError(f"--clients is {arguments.clients}; give at least 1")
    if arguments.output_file is not None and not (arguments.partition or arguments.csv):
        raise ValueError(
            "--output_file is for a file with new partitions: add --partition or --csv, or leave it out"
        )
    return arguments


def _recipes(arguments: argparse.Namespace) -> list[Recipe]:
    """What ``--partition`` asks for."""
    parts = [part.strip() for part in arguments.partition.split(",")]
    whole = {part: recipe for part in parts if (recipe := read_name(part)) is not None}
    clients, seed = arguments.clients or 100, arguments.seed or 0
    pairs = [*parse_kinds("partition", ",".join(part for part in parts if part not in whole))]
    for name in () if pairs else ("clients", "seed"):
        if getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name} applies only to a --partition that does not have the value in its name, and "
                "there is none: leave it out"
            )
    return [*whole.values(), *(Recipe(kind, number, clients, None, seed) for kind, number in pairs)]


def main(argv: Sequence[str]) -> None:
    """The command line."""
    arguments = _arguments(argv)
    recipes = _recipes(arguments)
    if arguments.output_dir is not None:
        output_folder("--output_dir", arguments.output_dir)
    if arguments.output_file is None:
        _measure_and_write(arguments, recipes)
        return
    output = output_file("--output_file", arguments.output_file, arguments.overwrite)
    with only_writer(output, arguments.overwrite):
        _measure_and_write(arguments, recipes)


def _measure_and_write(arguments: argparse.Namespace, recipes: Sequence[Recipe]) -> None:
    probe.probe(arguments.file)
    with DataFile(arguments.file) as file:
        taxonomy = arguments.taxonomy or default_taxonomy(file)
        new = {recipe.name: drawn_of(file, recipe, taxonomy) for recipe in recipes}
        if arguments.csv is not None:
            new[arguments.csv.stem] = read_csv(file, input_file("--csv", arguments.csv))
        measured = measure(file, taxonomy, new)
        print(as_text([statistics for statistics, _ in measured]))
        if is_lowest(file, taxonomy):
            print(LOWEST)
        if warning := alike(file, taxonomy):
            print(warning, file=sys.stderr)
        if arguments.output_dir is not None:
            from dataset.partitions.figures import draw  # matplotlib takes a second

            content = [asdict(statistics) for statistics, _ in measured]
            write_json(arguments.output_dir / "statistics.json", content)
            path = arguments.output_dir / "clients.csv"
            write_clients(file, taxonomy, new, path)
            print(f"wrote {path}", file=sys.stderr)
            for path in draw(file, [dealt for _, dealt in measured], taxonomy, arguments.output_dir):
                print(f"wrote {path}", file=sys.stderr)
        if arguments.output_file is not None:
            drawn = {recipe.name: recipe.provenance for recipe in recipes}
            write_with(file, arguments.output_file, new, drawn)
            print(f"wrote {arguments.output_file}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run(main))
