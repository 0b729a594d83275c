"""Draws ``house.png``: which package imports which, read from the source.

    python docs/draw_house.py

A box is a package, or the modules that lie directly in one of the three roots. An arrow points to what is
imported; the more import statements, the thicker it is.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parent.parent
ROOTS = {"benchmarks": "#4477aa", "pfl_ext": "#228833", "dataset": "#aa6633"}
OUTPUT = Path(__file__).with_name("house.png")
Edges = Counter[tuple[str, str]]


def package_of(module: str) -> str:
    """The box of a dotted module: ``pfl_ext.engine.cpu.kernels`` is in ``pfl_ext.engine``."""
    root, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return f"{root}.{first}" if (ROOT / root / first).is_dir() and first else root


def imported(file: Path) -> list[str]:
    """The modules of the three roots that a file imports."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.partition(".")[0] in ROOTS]


def edges() -> Edges:
    """How many import statements lead from one package to another."""
    out: Edges = Counter()
    for root in ROOTS:
        for file in (ROOT / root).rglob("*.py"):
            here = package_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
            out.update((here, there) for there in map(package_of, imported(file)) if there != here)
    return out


def levels(names: list[str], arrows: Edges) -> list[list[str]]:
    """The packages of one root in rows: each above most of what it imports."""
    inside = {(a, b): n for (a, b), n in arrows.items() if a in names and b in names}
    weight = {
        name: sum(n for (a, _), n in inside.items() if a == name)
        - sum(n for (_, b), n in inside.items() if b == name)
        for name in names
    }
    ordered = sorted(names, key=lambda name: (-weight[name], name))
    width = 4
    return [ordered[i : i + width] for i in range(0, len(ordered), width)]


def places(arrows: Edges) -> dict[str, tuple[float, float]]:
    """The centre of every box: benchmarks above, pfl_ext below on the left, dataset on the right."""
    names = sorted({name for edge in arrows for name in edge})
    out = {}
    corners = {"benchmarks": (2.2, 8.6), "pfl_ext": (0.0, 4.6), "dataset": (9.6, 4.6)}
    for root, (left, top) in corners.items():
        rows = levels([name for name in names if name.partition(".")[0] == root], arrows)
        for down, row in enumerate(rows):
            for right, name in enumerate(row):
                out[name] = (left + 2.3 * right + 0.5 * (down % 2), top - 1.5 * down)
    return out


def draw() -> None:
    """Write the picture."""
    arrows = edges()
    centre = places(arrows)
    figure, axes = plt.subplots(figsize=(15, 9))
    for (a, b), number in sorted(arrows.items()):
        crosses = a.partition(".")[0] != b.partition(".")[0]
        axes.add_patch(
            FancyArrowPatch(
                centre[a],
                centre[b],
                arrowstyle="-|>",
                mutation_scale=9,
                shrinkA=26,
                shrinkB=26,
                linewidth=0.4 + 0.12 * min(number, 20),
                color=ROOTS[a.partition(".")[0]],
                alpha=0.3 if crosses else 0.75,
                connectionstyle="arc3,rad=0.08",
            )
        )
    for name, (x, y) in centre.items():
        root, _, package = name.partition(".")
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.85, y - 0.28),
                1.7,
                0.56,
                boxstyle="round,pad=0.06",
                facecolor="white",
                edgecolor=ROOTS[root],
                linewidth=2 if package else 3,
                zorder=3,
            )
        )
        label = package.replace("visual_classification", "visual\nclassification") or f"{root}/*.py"
        axes.text(x, y, label, ha="center", va="center", fontsize=10, zorder=4)
    for root, (x, y) in {"benchmarks": (0.2, 8.6), "pfl_ext": (-2.2, 4.6), "dataset": (18.2, 4.6)}.items():
        axes.text(x, y, root, fontsize=15, color=ROOTS[root], weight="bold", ha="center", va="center")
    axes.set_xlim(-3.2, 19.4)
    axes.set_ylim(min(y for _, y in centre.values()) - 0.8, 9.3)
    axes.axis("off")
    figure.savefig(OUTPUT, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw()
