"""The published numbers beside ours: every row, how far its runs are, and whether it is in its band.

    python -m benchmarks.published.verify [ROW...]

Exit code 0: every row with a finished run is within its band. 1: one is not. 2: bad input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.published import rows, train
from benchmarks.published.rows import Row, names, read_row
from benchmarks.reporting.tables import markdown_table
from dataset.cli import run as run_command

HEAD = ["row", "scored", "published", "accepted", "ours", "n", "difference", "verdict"]


def scores(row: Row) -> dict[int, float]:
    """The accuracy of each finished run of a row, by seed, scored as the source does.

    Raises:
        ValueError: for a file that is damaged or of another row.
    """
    key = rows.SCORED[row.scored]
    found: dict[int, float] = {}
    for path in sorted(rows.RESULTS.glob(f"{row.name}-seed*.json")):
        if not path.stem.removeprefix(f"{row.name}-seed").isdigit():
            continue
        try:
            kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            of, seed, score = kept["row"], int(kept["seed"]), float(kept[key])
        except (ValueError, LookupError, TypeError) as fault:
            raise ValueError(f"{path} is not a result of a published row ({fault}): make it again") from None
        if (of, path.stem) != (row.name, f"{row.name}-seed{seed}") or not 0 <= score <= 100:
            raise ValueError(f"{path} is the result of another run: make it again")
        found[seed] = score
    return found


def remarks(row: Row, finished: Sequence[int]) -> str:
    """Which finished runs diverged, and how far the others are: ``seed 2 has done 17 rounds``."""
    parts = []
    for seed in finished:
        kept = json.loads((rows.RESULTS / f"{train.run_name(row, seed)}.json").read_text(encoding="utf-8"))
        if "diverged_in_round" in kept:
            parts.append(f"seed {seed} diverged in round {kept['diverged_in_round']}")
    for path in sorted(train.RUNS.glob(f"{row.name}-seed*/metrics.jsonl")):
        name = path.parent.name.removeprefix(f"{row.name}-seed")
        if name.isdigit() and int(name) not in finished:
            parts.append(f"seed {name} has done {len(path.read_text(encoding='utf-8').splitlines())} rounds")
    return ", ".join(parts)


def verdict(row: Row, values: Sequence[float], diverged: bool) -> str:
    """Whether the mean of our runs is within the row's band, in words; never where one has diverged."""
    if not values:
        return "no run"
    if row.band is None:
        return "nothing published"
    low, high = row.band
    return "within" if low <= fmean(values) <= high and not diverged else "OUTSIDE"


def cells(row: Row, found: dict[int, float], more: str) -> list[str]:
    """The table's line of a row."""
    values = list(found.values())
    published = band = ours = difference = "–"
    if row.published is not None:
        published = f"{row.published:g}" + ("" if row.deviation is None else f" ± {row.deviation:g}")
    if row.band is not None:
        band = f"{row.band[0]:g} to {row.band[1]:g}"
    if values:
        ours = f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")
    if values and row.published is not None:
        off = fmean(values) - row.published
        difference = f"{off:+.2f}" + (f" = {off / row.deviation:+.1f} sd" if row.deviation else "")
    n = str(len(values)) + (f" ({more})" if more else "")
    return [
        row.name,
        row.scored,
        published,
        band,
        ours,
        n,
        difference,
        verdict(row, values, "diverged" in more),
    ]


def table(asked: Sequence[Row]) -> tuple[str, list[str]]:
    """The table of some rows, and the names of those outside their band."""
    lines, outside = [], []
    for row in asked:
        found = scores(row)
        lines.append(cells(row, found, remarks(row, list(found))))
        outside += [row.name] if lines[-1][-1] == "OUTSIDE" else []
    return markdown_table(HEAD, lines), outside


def main(argv: Sequence[str]) -> None:
    """Print the table; end with exit code 1 where a finished row is outside its band."""
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    text, outside = table([read_row(name) for name in argv or names()])
    print(text)
    if outside:
        print(f"outside the band: {', '.join(outside)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(run_command(main))
