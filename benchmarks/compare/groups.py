"""Runs that differ by their seed alone, and what is said of several such groups together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.compare.measures import BY_CLASS, Measure
from benchmarks.core.config.digests import experiment
from benchmarks.core.config.effects import reason_for
from benchmarks.core.config.trees import Tree, as_word
from benchmarks.core.experiment import Experiment
from benchmarks.reporting.runs import RunRecord
from dataset.cli import counted
from dataset.pages import clean
from pfl_ext.tasks.score_kinds import LOSS, ScoreKinds

MOST_KEYS = 3
"""Keys that a label names; where more differ, it names the directory."""
MOST_LETTERS = 70
MOST_NAMES = 10
"""Runs that a line on the screen names."""
SIZES = ("data.image_size", "model.input_size")
"""The keys that say how large the images are in the data set, and as the network sees them."""
PARTITION = "data.partition"
"""The key that says which clients there are, where a benchmark has one."""


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed alone, by ascending seed."""

    label: str
    """Its name on the page, see `labelled`."""
    runs: tuple[RunRecord, ...]
    trained: type[Experiment[Any]]
    """What was trained, which says by which scores runs are judged, and which keys have an effect."""
    scores: tuple[str, ...] = ()
    """The scores to show, where they are given."""

    @property
    def headline(self) -> tuple[str, ...]:
        """The scores that its benchmark is judged by, or those that are given."""
        return self.scores or tuple(self.trained.headline)

    @property
    def judged_by(self) -> tuple[str, ...]:
        """These scores, and the one that chose the models if it is another one and none are given."""
        chosen = "last" if self.scores else self.runs[0].config.evaluation.best_by
        others = [] if chosen in (LOSS, "last") else [chosen]
        return tuple(dict.fromkeys((*self.headline, *others)))

    @cached_property
    def kinds(self) -> ScoreKinds:
        """How its scores are read."""
        first = (*self.finished, *self.runs)[0]
        return self.trained.score_kinds(first.config, first.results)

    @cached_property
    def finished(self) -> tuple[RunRecord, ...]:
        """The runs that have ended: only these have results, and only their mean is a group's."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def unfinished(self) -> tuple[RunRecord, ...]:
        """The runs that have not ended: under way, or stopped."""
        return tuple(run for run in self.runs if not run.finished)

    @cached_property
    def keys(self) -> Tree:
        """The keys of their config that have an effect, dotted, but for the seed and what else makes no other
        experiment."""
        config = self.runs[0].config
        idle = self.trained.benchmark.idle_keys(config)
        tree = experiment(dataclasses.asdict(config), type(config))
        return {key: value for key, value in tree.items() if reason_for(key, idle) is None}

    @property
    def keeps_parts(self) -> bool:
        """Whether each user keeps some variables of its model, so that no user has the server's model."""
        federated = self.runs[0].config.federated
        return "federated.algorithm" in self.keys and federated.chosen.keeps_parts(federated.chosen_options)

    @cached_property
    def has_sizes_of_setting(self) -> bool:
        """Whether the setting is a shipped one, and the sizes of images are its own."""
        config, benchmark = self.runs[0].config, self.trained.benchmark
        name = config.setting.lower()
        if name not in benchmark.settings:
            return False
        shipped = benchmark.parse([f"--config={name}"]).config
        ours, theirs = ((each.data.image_size, each.model.input_size) for each in (config, shipped))
        return ours == theirs

    @property
    def test_key(self) -> tuple[object, ...]:
        """What says on which images and by which classes the runs are scored: only such scores can be tested.

        The group has a run that has ended.
        """
        found = self.finished[0].outcome
        classes = found.get("classes") or next((found[key] for key in BY_CLASS if found.get(key)), ())
        return self.finished[0].data_key, self.keys.get("data.test_users"), *sorted(map(str, classes))

    @property
    def images_key(self) -> tuple[object, ...]:
        """What says which images the runs learn from, and at which size: `test_key`, the partition, the sizes
        of images and of the network's input, and which of a user's images are held out from training.

        The group has a run that has ended.
        """
        options = self.runs[0].config.federated.chosen_options
        held_out = getattr(options, "set_aside", 0) if "federated.algorithm" in self.keys else 0
        split_seed = self.keys.get("federated.options.split_seed") if held_out else None
        val_share = self.keys.get("data.val_share") if self.keys.get("data.scored") == "val" else None
        sizes = tuple(map(self.keys.get, SIZES))
        dealt = self.keys.get("data.partition")
        return self.test_key, *sizes, dealt, held_out, split_seed, val_share


@dataclass(frozen=True)
class Comparison:
    """What is shown: the groups in the order of the command line; and why some runs are not shown."""

    groups: tuple[Group, ...]
    left_out: tuple[str, ...]
    measures: Mapping[Path, Sequence[Measure]]
    """Measures of each run, keyed by the run's directory."""
    names: frozenset[str] = frozenset()
    """The names in place of labels, in which LaTeX may read mathematics."""

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]

    @property
    def labels(self) -> list[str]:
        """The groups' labels."""
        return [group.label for group in self.groups]

    @property
    def headline(self) -> tuple[str, ...]:
        """The scores that these runs are judged by, each once."""
        return tuple(dict.fromkeys(name for group in self.groups for name in group.judged_by))

    @property
    def judges_alike(self) -> bool:
        """Whether all groups are judged by the same scores, in the same units."""
        first = self.groups[0]
        return all((each.headline, each.kinds) == (first.headline, first.kinds) for each in self.groups)

    def unit(self, score: str) -> str:
        """The unit of a score by which some groups are judged; each, where theirs differ."""
        found = dict.fromkeys(each.kinds.unit(score) for each in self.groups if score in each.judged_by)
        return next(iter(found)) if len(found) < 2 else " or ".join(unit or "no unit" for unit in found)

    def is_lower_better(self, score: str) -> bool:
        """Whether the lower is the better one of a score by which some groups are judged."""
        return any(each.kinds.is_lower_better(score) for each in self.groups if score in each.judged_by)

    @property
    def usual(self) -> bool:
        """Whether all scores are in percent, and higher is better, but for the loss."""
        return not any(each.kinds.declared for each in self.groups)

    def unfinished(self, most: int | None = None) -> str:
        """How many runs have not ended, with the names of all or of the first `most`; empty if all have."""
        names = [clean(run.directory) for run in self.runs if not run.finished]
        if not names:
            return ""
        listed = ", ".join(names[:most])
        if most is not None and len(names) > most:
            listed += f" and {len(names) - most:,} more"
        are = "is" if len(names) == 1 else "are"
        return (
            f"{len(names):,} of {counted(len(self.runs), 'run', 'runs')} {are} not finished and left out of "
            f"the scores on test: {listed}"
        )

    def showing(self, scores: Sequence[str]) -> Comparison:
        """The same by these scores instead of those that the benchmarks are judged by.

        Raises:
            ValueError: for a score that no run has on test.
        """
        known = {score: None for run in self.runs for score in (run.results or {}).get("test", ())}
        if unknown := [score for score in scores if score not in known]:
            raise ValueError(f"no run has the score {unknown[0]!r} on test; there are {', '.join(known)}")
        groups = [dataclasses.replace(group, scores=tuple(dict.fromkeys(scores))) for group in self.groups]
        return dataclasses.replace(self, groups=tuple(groups))

    def values(self, group: Group, section: str, name: str) -> list[float]:
        """A measure of each run of a group that has it; where some runs have ended, of these alone."""
        return list(self.by_seed(group, section, name).values())

    def by_seed(self, group: Group, section: str, name: str) -> dict[int, float]:
        """The same by the runs' seeds, each of which one run has."""
        runs = group.finished or group.runs
        return {
            run.seed: one.value
            for run in runs
            for one in self.measures[run.directory]
            if (one.section, one.name) == (section, name)
        }

    def differences(self) -> dict[str, list[Any]]:
        """The values of each group for the keys in which two of them differ; None: the key does nothing."""
        keys = dict.fromkeys(key for group in self.groups for key in group.keys)
        values = {key: [group.keys.get(key) for group in self.groups] for key in keys}
        return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def labelled(groups: Sequence[Group]) -> list[Group]:
    """The groups, each with a label: its setting and, among groups of one setting, keys that tell it apart.

    The setting has its algorithm, too, where the command line gave another than the setting's own; and its
    partition, where groups of one setting differ in it, whatever else they differ in: their clients are not
    the same. It has the sizes of images in which groups of a benchmark differ, unless all have those of their
    shipped settings, whose names say it. Where the keys are many, the label is the setting and the directory
    of the first run.
    """
    trees = [group.keys for group in groups]
    settings = _settings(groups)
    labels = []
    for group, tree, setting in zip(groups, trees, settings):
        rivals = [other for other, name in zip(trees, settings) if name == setting and other != tree]
        keys = telling_keys(tree, rivals)
        if len(keys) <= MOST_KEYS:
            labels.append(", ".join([setting, *values_in_words(tree, keys)]))
        else:
            labels.append(f"{setting} ({group.runs[0].directory.name})")
    labels = [_cut(label) for label in labels]
    several = Counter(labels)
    for place, group in enumerate(groups):
        if several[labels[place]] > 1:
            labels[place] = f"{_cut(settings[place])} ({group.runs[0].directory})"
    return [dataclasses.replace(group, label=label) for group, label in zip(groups, labels)]


def _cut(label: str) -> str:
    return label if len(label) <= MOST_LETTERS else f"{label[: MOST_LETTERS - 1]}…"


def _settings(groups: Sequence[Group]) -> list[str]:
    """The setting of each group, with its algorithm, its partition and its sizes where these must be said."""
    names = []
    for group in groups:
        config = group.runs[0].config
        name = group.trained.benchmark.name_of(config) or "no setting"
        rivals = [other for other in groups if other.runs[0].config.setting == config.setting]
        if PARTITION in group.keys and len({other.keys.get(PARTITION) for other in rivals}) > 1:
            name += f", partition {group.keys[PARTITION] or 'of the file'}"
        names.append(", ".join([name, *values_in_words(group.keys, _sizes_to_say(group, groups))]))
    return names


def _sizes_to_say(group: Group, groups: Sequence[Group]) -> list[str]:
    """The keys of `SIZES` that all labels of a benchmark name: those in which its groups differ, unless the
    names of their settings say it."""
    of_kind = [other for other in groups if other.trained is group.trained]
    differing = [key for key in SIZES if len({other.keys.get(key) for other in of_kind}) > 1]
    if not differing or all(other.has_sizes_of_setting for other in of_kind):
        return []
    return [key for key in differing if key in group.keys]


def values_in_words(tree: Tree, keys: Sequence[str]) -> list[str]:
    """Each key's last word and its value; the whole key where two have the same last word."""
    short = [key.rpartition(".")[2] for key in keys]
    words = [key if short.count(one) > 1 else one for key, one in zip(keys, short)]
    return [f"{word} {as_word(tree.get(key))}" for word, key in zip(words, keys)]


def telling_keys(tree: Tree, rivals: Sequence[Tree]) -> list[str]:
    """Keys that together tell a config from all others: the one that tells it from most, and so on.

    A key that all have, as the kind of a compression, comes before one that goes with some kind.
    """
    keys = list(dict.fromkeys(key for one in (tree, *rivals) for key in one))
    shared = {key for key in keys if all(key in one for one in (tree, *rivals))}
    found, left = list[str](), list(rivals)

    def tells(key: str) -> tuple[bool, int]:
        count = sum(other.get(key) != tree.get(key) for other in left)
        return key in shared and count > 0, count

    while left:
        best = max(keys, key=tells)
        found.append(best)
        left = [other for other in left if other.get(best) == tree.get(best)]
    return found


def named(
    comparison: Comparison, names: Mapping[str, str], rows: Mapping[str, str] | None = None
) -> Comparison:
    """The groups by these names instead of their labels, those that have one first, in the names' order.

    Args:
        comparison: what is compared.
        names: by label.
        rows: by a group's label, that of its row in a table of rows and columns. A group without a name comes
            where its row does.

    Raises:
        ValueError: when two groups would have one name.
    """
    rows = rows or {}
    order = {label: place for place, label in enumerate(names)}

    def place(group: Group) -> int:
        return order.get(group.label, order.get(rows.get(group.label, ""), len(order)))

    groups = sorted(comparison.groups, key=place)
    found = [dataclasses.replace(group, label=names.get(group.label, group.label)) for group in groups]
    refuse_doubles([group.label for group in found])
    return dataclasses.replace(comparison, groups=tuple(found), names=frozenset(names.values()))


def refuse_doubles(labels: Sequence[str]) -> None:
    """Raise ValueError when two things would have one name."""
    if several := [label for label, count in Counter(labels).items() if count > 1]:
        raise ValueError(f"--names gives the name {several[0]!r} to two groups: give each a different name")
