"""Scores over users, each by the model that it uses: its own where it has one, or else the server's."""

from __future__ import annotations

from benchmarks.compare.groups import Comparison, Group
from benchmarks.reporting.single_users import MODELS
from pfl_ext.tasks.multi_label_scores import shown

OWN = MODELS["personal"]
"""How a section of users' own models ends."""


def sections_of(comparison: Comparison, score: str) -> list[str]:
    """The sections of the measures of a score over users, by kind of users and split, without `OWN`."""
    found = [one.section for run in comparison.runs for one in comparison.measures[run.directory]]
    first = f"users' {shown(score)}, "
    return list(dict.fromkeys(each.removesuffix(OWN) for each in found if each.startswith(first)))


def by_seed(comparison: Comparison, group: Group, section: str, name: str) -> dict[int, float]:
    """A measure of a section of `sections_of` by seed, of users' own models where the group has such."""
    own = comparison.by_seed(group, section + OWN, name)
    return own or comparison.by_seed(group, section, name)
