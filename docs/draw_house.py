"""Draws ``house.png``: which part of the house imports which, read from the source.

    python docs/draw_house.py [OUTPUT]

A box is a package (thick), or a module that lies directly in one of the three roots (thin). Boxes stand in
rows, each above what it imports. An arrow is left out where a longer way of arrows leads to the same box. A
dashed arrow goes up: two parts that import each other. The broad arrows between the roots say how many import
statements cross.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib
import networkx  # comes with torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parent.parent
COLOURS = {"benchmarks": "#33628f", "pfl_ext": "#2d7d3a", "dataset": "#a05a2c"}
OUTPUT = Path(__file__).with_name("house.png")
WIDTH, HEIGHT, ACROSS, DOWN, MOST = 2.3, 0.55, 2.75, 1.12, 4
"""Width and height of a box; distances between boxes in a row, and between rows; most boxes in a row."""
Arrows = Mapping[tuple[str, str], int]
Point = tuple[float, float]


def modules() -> list[str]:
    """Today's boxes: packages and loose modules of each root, as ``pfl_ext.engine``."""
    found = []
    for root in COLOURS:
        for path in sorted((ROOT / root).iterdir()):
            if path.suffix == ".py" and path.stem != "__init__":
                found.append(f"{root}.{path.stem}")
            elif path.is_dir() and any(path.glob("*.py")):
                found.append(f"{root}.{path.name}")
    return found


def box_of(dotted: str) -> str:
    """The box of a module or of a name in it: ``pfl_ext.engine.cpu.kernels`` is in ``pfl_ext.engine``."""
    return ".".join(dotted.split(".")[:2])


def imported(file: Path) -> list[str]:
    """The dotted names of the three roots that a file imports."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.partition(".")[0] in COLOURS]


def arrows_between(boxes: Sequence[str]) -> Arrows:
    """How many imported names lead from one box to another."""
    found: Counter[tuple[str, str]] = Counter()
    for root in COLOURS:
        for file in sorted((ROOT / root).rglob("*.py")):
            here = box_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
            found.update((here, there) for there in map(box_of, imported(file)))
    return {(a, b): n for (a, b), n in found.items() if a != b and a in boxes and b in boxes}


def ordered(boxes: Iterable[str], arrows: Arrows) -> list[str]:
    """Importers first. Next is a box that no box left imports, or else the one that imports the most."""
    left, order = set(boxes), []
    while left:
        excess = dict.fromkeys(left, 0)
        for (a, b), number in arrows.items():
            if a in left and b in left:
                excess[a] += number
                excess[b] -= number
        of_most = max(
            sorted(left), key=lambda box: (not any(b == box and a in left for a, b in arrows), excess[box])
        )
        order.append(of_most)
        left.remove(of_most)
    return order


def rows_of(order: Sequence[str], arrows: Arrows) -> list[list[str]]:
    """The boxes of one root in rows: each below all that import it, but for arrows that go up."""
    depth: dict[str, int] = {}
    for place, box in enumerate(order):
        depth[box] = max((depth[above] + 1 for above in order[:place] if (above, box) in arrows), default=0)
    rows = []
    for level in range(max(depth.values()) + 1):
        row = [box for box in order if depth[box] == level]
        rows += [row[i : i + MOST] for i in range(0, len(row), MOST)]
    return rows


def shown(order: Sequence[str], arrows: Arrows) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The arrows that go down, without those that a longer way replaces; and those that go up."""
    place = {box: number for number, box in enumerate(order)}
    inside = [(a, b) for a, b in arrows if a in place and b in place]
    graph = networkx.DiGraph([(a, b) for a, b in inside if place[a] < place[b]])
    return sorted(networkx.transitive_reduction(graph).edges), [
        (a, b) for a, b in inside if place[a] > place[b]
    ]


def draw_arrow(axes: Axes, start: Point, end: Point, colour: str, goes_up: bool) -> None:
    """Draw an arrow from a box's lower edge to another's upper edge; one that goes up is curved."""
    half = HEIGHT / 2 + 0.07
    if goes_up:
        ends = (start[0] + 0.8, start[1] + half), (end[0] + 0.8, end[1] - half)
    else:
        ends = (start[0], start[1] - half), (end[0], end[1] + half)
    axes.add_patch(
        FancyArrowPatch(
            *ends,
            arrowstyle="-|>",
            mutation_scale=12,
            linewidth=0.8 if goes_up else 1.1,
            linestyle=(0, (3, 3)) if goes_up else "-",
            color="#c0392b" if goes_up else colour,
            alpha=0.55 if goes_up else 0.75,
            shrinkA=0,
            shrinkB=0,
            connectionstyle="arc3,rad=0.25" if goes_up else "arc3,rad=0",
        )
    )


def draw_root(axes: Axes, root: str, arrows: Arrows, left: float, top: float, width: float) -> Point:
    """One root as a panel with its rows; the panel's right lower corner."""
    own = [box for box in modules() if box.partition(".")[0] == root]
    order, colour = ordered(own, arrows), COLOURS[root]
    rows = rows_of(order, arrows)
    centre: dict[str, Point] = {}
    for down, row in enumerate(rows):
        indent = (width - ACROSS * len(row)) / 2
        for right, box in enumerate(row):
            centre[box] = (left + indent + ACROSS * (right + 0.5), top - 1.0 - DOWN * down)
    bottom = top - 1.0 - DOWN * (len(rows) - 1) - 0.65
    panel = FancyBboxPatch((left, bottom), width, top - bottom, boxstyle="round,pad=0.1", zorder=0)
    panel.set(facecolor=colour, edgecolor="none", alpha=0.07)
    axes.add_patch(panel)
    axes.text(left + 0.1, top - 0.12, root, fontsize=15, color=colour, weight="bold", va="top")
    down_arrows, up_arrows = shown(order, arrows)
    for a, b in down_arrows:
        draw_arrow(axes, centre[a], centre[b], colour, False)
    for a, b in up_arrows:
        draw_arrow(axes, centre[a], centre[b], colour, True)
    for box, (x, y) in centre.items():
        is_package, name = (ROOT / root / box.partition(".")[2]).is_dir(), box.partition(".")[2]
        corner = (x - WIDTH / 2, y - HEIGHT / 2)
        patch = FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle="round,pad=0.05", zorder=3)
        patch.set(facecolor="white", edgecolor=colour, linewidth=2.2 if is_package else 0.9)
        axes.add_patch(patch)
        label = name if is_package else f"{name}.py"
        axes.text(
            x, y, label, ha="center", va="center", fontsize=min(12, max(6.5, 115 / len(label))), zorder=4
        )
    return left + width, bottom


def draw_crossing(axes: Axes, number: int, start: Point, end: Point, colour: str) -> None:
    """The imports from one root to another, as one broad arrow with their number."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="simple,head_width=30,tail_width=16,head_length=14",
            color=colour,
            alpha=0.6,
        )
    )
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    sideways = start[1] == end[1]
    place = (middle[0], middle[1] + 0.55) if sideways else (middle[0] + 0.5, middle[1])
    words = f"{number} imports"
    axes.text(*place, words, fontsize=12, color=colour, ha="center" if sideways else "left", va="center")


def draw(output: Path) -> None:
    """Write the picture; its metadata hold the boxes by name."""
    boxes = modules()
    arrows = arrows_between(boxes)
    crossing: Counter[tuple[str, str]] = Counter()
    for (a, b), number in arrows.items():
        crossing[a.partition(".")[0], b.partition(".")[0]] += number
    figure, axes = plt.subplots(figsize=(17, 12.5))
    half, gap = ACROSS * MOST + 0.2, 2.2
    whole = 2 * half + gap
    _, under = draw_root(axes, "benchmarks", arrows, 0.0, 0.0, whole)
    top = under - 1.2
    ends = [
        draw_root(axes, "pfl_ext", arrows, 0.0, top, half),
        draw_root(axes, "dataset", arrows, half + gap, top, half),
    ]
    for root, middle in (("pfl_ext", half / 2), ("dataset", half + gap + half / 2)):
        number = crossing["benchmarks", root]
        draw_crossing(axes, number, (middle, under - 0.15), (middle, top + 0.15), COLOURS["benchmarks"])
    level = top - 2.6
    draw_crossing(
        axes,
        crossing["pfl_ext", "dataset"],
        (half + 0.15, level),
        (half + gap - 0.15, level),
        COLOURS["pfl_ext"],
    )
    axes.set_xlim(-0.3, whole + 0.3)
    axes.set_ylim(min(bottom for _, bottom in ends) - 0.3, 0.3)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(output, dpi=80, bbox_inches="tight", metadata={"Description": " ".join(boxes)})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
