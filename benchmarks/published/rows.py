"""The rows: what was published, and which band was accepted before the first run.

Where a source publishes a protocol and no number, Published and Accepted are ``none``, and no run can fail.

A row is a YAML of `benchmarks.visual_classification`. Its opening comment has a line for each of `WORDS`; in
the values of its keys ``{seed}`` stands for the run's seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.core.config.trees import dotted, read_yaml

HERE = Path(__file__).parent
CONFIGS, RESULTS = HERE / "configs", HERE / "results"
SEED = "{seed}"
WORDS = ("Command", "Source", "Published", "Scored", "Accepted", "Time", "Deviates")
SCORED = {"best round": "best", "last round": "last", "last 10 rounds": "last_10", "own images": "own"}
"""Which accuracy a row compares, and its name in a kept result.

Of the last 10 rounds it is the mean. Own images are those that users set aside, each scored by its user's own
model after the last round.
"""
_PUBLISHED = re.compile(r"none|([0-9.]+)(?: ± ([0-9.]+))?")
_ACCEPTED = re.compile(r"none|([0-9.]+) to ([0-9.]+)")


@dataclass(frozen=True)
class Row:
    """One published number, test accuracy in percent."""

    name: str
    title: str
    source: str
    published: float | None
    """The published accuracy; None: the source has a protocol, but no number."""
    deviation: float | None
    """The source's standard deviation, if it states one."""
    scored: str
    """Which accuracy it is: one of `SCORED`."""
    band: tuple[float, float] | None
    """The interval in which our mean is accepted, fixed before the first run; None: nothing was published."""
    by_seed: Mapping[str, str]
    """The keys whose values depend on the seed."""

    @property
    def path(self) -> Path:
        """Its YAML."""
        return CONFIGS / f"{self.name}.yaml"

    def words(self, seed: int) -> list[str]:
        """The arguments of `benchmarks.visual_classification.train` for a run with this seed."""
        keys = [f"--{key}={value.replace(SEED, str(seed))}" for key, value in self.by_seed.items()]
        return ["--config", str(self.path), "--seed", str(seed), *keys]


def names() -> list[str]:
    """The names of all rows."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def read_row(name: str) -> Row:
    """One row.

    Raises:
        ValueError: for a name that is none, and a YAML whose opening comment lacks a line or has a wrong one.
    """
    if name not in names():
        raise ValueError(f"there is no published row {name!r}: choose one of {', '.join(names())}")
    path = CONFIGS / f"{name}.yaml"
    said = _opening(path)
    lacking = [word for word in (name, *WORDS) if word not in said]
    if lacking:
        raise ValueError(f"{path}: its opening comment has no line '# {lacking[0]}: ...'")
    published, accepted = _PUBLISHED.fullmatch(said["Published"]), _ACCEPTED.fullmatch(said["Accepted"])
    if (
        published is None
        or accepted is None
        or said["Scored"] not in SCORED
        or (published[1] is None) != (accepted[1] is None)
    ):
        raise ValueError(
            f"{path}: write Published as '62.47 ± 0.43', Accepted as '60.5 to 64.5', both as 'none' where "
            f"the source has no number, Scored as {' or '.join(SCORED)}"
        )
    return Row(
        name,
        said[name],
        said["Source"],
        float(published[1]) if published[1] else None,
        float(published[2]) if published[2] else None,
        said["Scored"],
        (float(accepted[1]), float(accepted[2])) if accepted[1] else None,
        {key: value for key, value in dotted(read_yaml(path)).items() if SEED in str(value)},
    )


def _opening(path: Path) -> dict[str, str]:
    """The lines ``# Word: text`` before the first key; indented lines go on with the one before."""
    said: dict[str, str] = {}
    word = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        found = re.match(r"# (\S+?): +(.+)", line)
        if found:
            word = found[1]
            said[word] = found[2].strip()
        elif word:
            said[word] += " " + line[1:].strip()
    return said
