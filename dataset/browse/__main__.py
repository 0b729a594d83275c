"""A page of a file's users: their images with labels, masks and boxes, their sizes, and their label skew.

    python -m dataset.browse FILE [--output PAGE.html] [--users 12] [--images 8] [--split train]

The page is one self-contained HTML file. Users and images are drawn by --seed. The page ends when --max_mb
are reached, and says so. Images show people and places: publish a page only if you may publish its data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.browse.owners import (
    Owners,
    chosen,
    chosen_rows,
    label_counts,
    looked_at,
    owners_of,
    per_class,
    size_counts,
    skew_of,
)
from dataset.browse.thumbnails import legend, thumbnail
from dataset.cli import OneLineParser, counted, output_file, run
from dataset.pages import Html, bars, bullets, contents, join, page, section, table, tag, write
from dataset.store.hdf5 import DataFile
from dataset.store.views import PARTITIONED

MOST_CLASSES = 20
LIMITS = {"users": (1, 200), "images": (1, 100), "side": (32, 512), "max_mb": (1, 64)}
PAGES = (".html", ".htm")
KINDS = {"label set": "labels", "class": "one class an image", "mask": "masks", "boxes": "boxes"}
FACTS = ("source", "description", "title", "licence", "tool")
STYLE = """
.images{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(16rem,45%),1fr));gap:1rem .9rem;
  align-items:start;margin:.6rem 0 1.5rem}
.images:has(.tiny){grid-template-columns:repeat(auto-fill,minmax(min(8rem,28%),1fr))}
.images img{display:block;width:100%;background:var(--raised)}
.images .tiny img{image-rendering:pixelated}
.images figcaption{font-weight:400;font-size:.85rem;line-height:1.35;color:var(--muted);margin:.3rem 0 0;
  overflow-wrap:anywhere}
.images figcaption b{font-weight:600}
.patch{display:inline-block;width:.9rem;height:.9rem;border:1px solid var(--muted);margin-right:.4rem;
  vertical-align:-.1rem}
.bars .name{font-variant-numeric:tabular-nums}
"""


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m dataset.browse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", type=Path, help="the data file, as make flair-data or python -m dataset.convert writes it"
    )
    parser.add_argument(
        "--output",
        "--output_file",
        type=Path,
        help="the page; by default FILE's name with .html, in this folder",
    )
    parser.add_argument("--split", default=PARTITIONED, help="train, val or test (default: train)")
    parser.add_argument(
        "--partition",
        help="name of a partition of the file, or of one to draw, such as lda-0.5-clients-10-seed-0",
    )
    parser.add_argument("--users", type=int, default=12, help="number of users shown (default: 12)")
    parser.add_argument("--images", type=int, default=8, help="number of images shown of a user (default: 8)")
    parser.add_argument(
        "--side", type=int, default=288, help="longer side of an image in pixels (default: 288)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed that chooses users and images (default: 0)")
    parser.add_argument("--max_mb", type=int, default=8, help="size of the page in MB (default: 8)")
    options = parser.read(argv)
    for name, (low, high) in LIMITS.items():
        if not low <= getattr(options, name) <= high:
            raise ValueError(f"--{name} is {getattr(options, name)}: give a number from {low} to {high}")
    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}: give a whole number of at least 0")
    if options.output is None:
        options.output = Path(options.file.with_suffix(".html").name)
    output, file = options.output, options.file
    if output.is_file() and (output.suffix.lower() not in PAGES or (file.exists() and output.samefile(file))):
        raise ValueError(f"--output {output} exists and is not an HTML page: give a new file name")
    return options


def splits_table(file: DataFile) -> Html:
    """Users and images of each split."""
    rows = []
    for name in file.splits:
        split = file.split(name)
        sizes = np.bincount(split.user_index, minlength=split.num_users)
        spread = (sizes.min(), np.median(sizes), sizes.mean(), sizes.max())
        counts = (split.num_users, split.num_images)
        rows.append([name, *(f"{n:,}" for n in counts), *map(_number, spread)])
    heads = ["split", "users", "images", "least", "median", "mean", "most"]
    return table("Splits, and images of a user", heads, rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def about(file: DataFile) -> Html:
    """The file's description of itself."""
    lines = [
        join([tag("b", name), f": {file.provenance[name]}"]) for name in FACTS if file.provenance.get(name)
    ]
    for name in file.annotation_names:
        kind = KINDS[file.split(file.splits[0]).annotations[name].kind]
        classes = counted(len(file.label_mapping(name)), "class", "classes")
        lines.append(join([tag("b", name), f": {kind}, {classes}"]))
    return bullets(lines)


def sizes_chart(owners: Owners) -> Html:
    """How many users have how many images."""
    sizes = owners.sizes[owners.sizes > 0]
    if not len(sizes):
        return tag("p", "No user has an image here.")
    largest = np.sort(sizes)[-max(1, -(-len(sizes) // 10)) :].sum() / sizes.sum()
    text = (
        f"{counted(len(sizes), 'user has', 'users have')} {sizes.sum():,} images: "
        f"{sizes.min():,} to {sizes.max():,} each, half of the users at most {_number(np.median(sizes))}. "
        f"The largest tenth of the users has {100 * largest:.0f} % of the images."
    )
    return join([tag("p", text), bars("Users by their number of images", size_counts(owners.sizes))])


def labels_of(file: DataFile, split: str, owners: Owners, name: str, seed: int) -> Html:
    """Number of images with each class, and how much users differ."""
    users = looked_at(owners, file.split(split), name, seed)
    rows = np.concatenate([owners.of(user) for user in users]) if users else np.empty(0, np.int64)
    found, sizes = label_counts(file, split, name, rows), owners.sizes[users]
    counts, more = per_class(found, file.label_mapping(name), MOST_CLASSES)
    skew = skew_of(found, sizes, seed)
    left_out = int((owners.sizes > 0).sum()) - len(users)
    parts: list[object] = [tag("h3", name)]
    if left_out:
        parts.append(
            tag("p", f"Counted over {len(users):,} users, drawn by the seed; {left_out:,} are left out.")
        )
    if skew is None:
        return join([*parts, tag("p", "No image has a label here.")])
    title = f"Images with each of the {len(counts)} commonest classes" if more else "Images with each class"
    charts = [bars(title, counts, 2)]
    if skew.users > 1:
        charts += [
            bars("Users by their distance from all users' labels", skew.histogram, 1),
            bars("Users by their number of classes", skew.classes, 4),
        ]
        parts.append(
            tag(
                "p",
                f"The mean distance of a user's labels from those of all users is {skew.mean:.2f}, weighted "
                f"by the users' labels; were the labels dealt at random, it would be {skew.at_random:.2f}. "
                "The distance is the sum over the classes of the differences of their shares: 0 is the same "
                "mix, 2 is no class in common.",
            )
        )
    parts.append(tag("div", *charts, class_="charts"))
    return join([*parts, tag("p", f"{more:,} other classes occur.", class_="note") if more else ""])


def users_part(file: DataFile, options: argparse.Namespace, owners: Owners) -> tuple[Html, str]:
    """The part of the page with users, and a sentence about it."""
    users = chosen(owners, options.users, options.seed)
    room = options.max_mb * 1_000_000
    parts, drawn, used, shown_images, shown_users, full = [], frozenset[Any](), 0, 0, 0, False
    for user in users:
        name, figures = owners.user_ids[user], list[Html]()
        for row in chosen_rows(owners, user, options.images, options.seed).tolist():
            made = thumbnail(file, options.split, row, name, options.side)
            full = used + made.size > room
            if full:
                break
            used, drawn = used + made.size, drawn | made.classes
            figures.append(made.html)
        if not figures:
            break
        shown_users, shown_images = shown_users + 1, shown_images + len(figures)
        size = int(owners.sizes[user])
        head = tag("h3", f"User {name}: {counted(size, 'image', 'images')}")
        less = tag("p", f"{len(figures)} of them are shown.", class_="note") if len(figures) < size else ""
        parts.append(join([head, less, tag("div", *figures, class_="images")]))
    said = (
        f"{shown_users:,} of {int((owners.sizes > 0).sum()):,} users, drawn by the seed {options.seed}, with "
        f"{shown_images:,} images, {used / 1e6:.1f} MB."
    )
    if full:
        said += (
            f" The page ends here, because more images would make it larger than {options.max_mb} MB: "
            "raise --max_mb."
        )
    names = {
        name: {k: text for text, k in file.label_mapping(name).items()} for name in file.annotation_names
    }
    colours = legend(names, drawn) if drawn else Html()
    return join([tag("p", said), colours, *parts]), said


def main(argv: Sequence[str]) -> None:
    """The command line."""
    options = _options(argv)
    output = output_file("--output", options.output)
    with DataFile(options.file) as file:
        owners = owners_of(file, options.split, options.partition)
        shown, said = users_part(file, options, owners)
        names = file.annotation_names
        labels = join(labels_of(file, options.split, owners, name, options.seed) for name in names)
        body = {
            "The file": [about(file), splits_table(file)],
            "Sizes of users": [sizes_chart(owners)],
            "Labels and their skew": [labels] if names else [],
            "Users": [shown],
        }
        held = list(file.split(options.split).partitions)
    known = {title: parts for title, parts in body.items() if parts}
    whose = "the file's users" if options.partition is None else f"the clients of {options.partition}"
    intro = join(
        [f"The split {options.split}, by {whose}. Made by ", tag("code", "python -m dataset.browse"), "."]
    )
    if options.partition is None and len(owners.user_ids) == 1:
        hint = f"one user owns all images: see its clients with --partition {next(iter(held), 'NAME')}"
        print(hint, file=sys.stderr)
    sections = [section(title, *parts) for title, parts in known.items()]
    write(output, page(f"Users of {options.file.name}", intro, [contents(known), *sections], STYLE))
    print(f"{said} written: {output} ({output.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    sys.exit(run(main))
