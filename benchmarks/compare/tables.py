"""The tables of a comparison as parts of a page, and its numbers as CSV."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from benchmarks.compare import each_user, in_use
from benchmarks.compare.charts import key
from benchmarks.compare.crossed import Crossed
from benchmarks.compare.groups import Comparison, Group
from benchmarks.compare.measures import SPLITS, Declared, Unit, in_words, unit_of
from benchmarks.compare.privacy import in_short, privacy_of
from benchmarks.compare.significance import CONFIDENCE, Difference, pairs
from benchmarks.core.code_version import short_commit
from benchmarks.core.config.trees import as_word
from benchmarks.reporting.tables import csv_table
from dataset.pages import Html, bullets, clean, join, table, tag, text
from pfl_ext.tasks.multi_label_scores import shown
from pfl_ext.tasks.score_kinds import PERCENT, decimals, labelled

CSV_HEAD = ("group", "run", "seed", "state", "section", "measure", "unit", "value")
FACTS = ("dataset", "data_sha256", "commit", "torch", "hardware", "arithmetic")
"""What results.json says of where and with what a run was made."""
NONE, TEST = "–", SPLITS["test"]


def name_of(comparison: Comparison, group: Group) -> Html:
    """A group's line and name, as every table has them."""
    return key(comparison.groups.index(group), breakable(group.label))


def breakable(name: str) -> Html:
    """A name that may be broken after its dots and underscores, where a line ends."""
    return Html(text(name).replace(".", ".<wbr>").replace("_", "_<wbr>"))


def unfinished(comparison: Comparison) -> Html:
    """The runs that have not ended, and how far they are."""
    lines = [
        f"{group.label}, seed {run.seed}: {run.progress}"
        for group in comparison.groups
        for run in group.unfinished
    ]
    return join([tag("h3", "Not finished: still running, or stopped"), bullets(lines)]) if lines else Html()


def judged_by(comparison: Comparison) -> tuple[str, ...]:
    """The scores by which all groups are judged; empty where groups are of several kinds."""
    return comparison.headline if comparison.judges_alike else ()


def on_test(comparison: Comparison, score: str) -> str:
    """The head of a column of a score by which all groups are judged: ``accuracy on test (%)``."""
    return labelled(f"{shown(score)} on test", comparison.unit(score))


def first_score(comparison: Comparison) -> str:
    """The head of the column that has the first score of each group where these are of several kinds."""
    units = {group.kinds.unit(group.headline[0]) for group in comparison.groups}
    return labelled("first score on test", PERCENT if units == {PERCENT} else "")


def named_first(group: Group) -> str:
    """The name of a group's first score, with its unit where that is not percent."""
    score = group.headline[0]
    unit = group.kinds.unit(score)
    return shown(score) if unit == PERCENT else labelled(shown(score), unit)


def overview(comparison: Comparison) -> Html:
    """What is compared: a row for each group, with its first scores, time, bytes and epsilon."""
    scores = judged_by(comparison)
    rows = []
    for group in comparison.groups:
        seeds = ", ".join(f"{run.seed}{'' if run.finished else ' (not finished)'}" for run in group.runs)
        cells = []
        for score in scores or group.headline[:1]:
            values = comparison.values(group, TEST, shown(score))
            named = f"{named_first(group)} " if values and not scores else ""
            cells.append(named + in_words(values, unit_of(score, group.kinds)))
        cells.append(in_words(comparison.values(group, "time", "wall clock"), "seconds"))
        cells.append(in_words(comparison.values(group, "bytes", "the whole run"), "bytes"))
        rows.append([name_of(comparison, group), seeds, *cells, in_short(group)])
    heads = [on_test(comparison, score) for score in scores] or [first_score(comparison)]
    heads = ["group", "seeds", *heads, "wall clock", "bytes, whole run", "epsilon"]
    return table("Groups: runs that differ by their seed alone", heads, rows)


def by_key(comparison: Comparison, crossing: Crossed) -> Html:
    """A table for each score by which runs are judged, in the rows and columns of `crossed`."""
    parts = []
    for score in judged_by(comparison):
        rows = []
        for place, label in enumerate(crossing.rows):
            groups = [crossing.cells.get((place, column)) for column in range(len(crossing.columns))]
            cells = [NONE if each is None else _score(comparison, each, score, crossing) for each in groups]
            rows.append([breakable(label), *cells])
        caption = f"{on_test(comparison, score)} by {crossing.key}"
        parts.append(table(caption, [crossing.key, *map(breakable, crossing.columns)], rows))
    return join([*parts, tag("p", crossing.in_words(), class_="note")])


def _score(comparison: Comparison, group: Group, score: str, crossing: Crossed) -> str:
    values = comparison.values(group, TEST, shown(score))
    return in_words(values, unit_of(score, group.kinds)) + crossing.fewer(group)


def amount(value: float) -> str:
    """A number in three digits, or more where it is a large whole one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measured(comparison: Comparison, sections: Sequence[str]) -> Html:
    """A table of each of these sections, with the groups that have numbers in it; where these are judged by
    other scores, a table for each kind."""
    kinds = dict.fromkeys(group.headline for group in comparison.groups)
    return join(_measured(comparison, section, kinds) for section in sections)


def _measured(comparison: Comparison, section: str, kinds: Collection[tuple[str, ...]]) -> Html:
    of_all = section in ("time", "bytes", "cost")
    parts = []
    for headline in [None] if of_all else kinds:
        groups = [group for group in comparison.groups if headline in (None, group.headline)]
        names = _columns(comparison, groups, section, headline or ())
        rows = []
        for group in groups:
            values = [comparison.values(group, section, name) for name in names]
            if any(values):
                n = str(max(map(len, values)))
                rows.append([name_of(comparison, group), n, *map(in_words, values, names.values())])
        by = (
            f", judged by {shown(headline[0])}"
            if headline and len(kinds) > 1 and section in SPLITS.values()
            else ""
        )
        caption = f"{section[0].upper()}{section[1:]}{by}"
        heads = [labelled(name, unit) if isinstance(unit, Declared) else name for name, unit in names.items()]
        parts += [table(caption, ["group", "n", *heads], rows)] if rows else []
    return join(parts)


def _columns(
    comparison: Comparison, groups: Sequence[Group], section: str, headline: Sequence[str]
) -> dict[str, Unit]:
    """The names of the measures of a section and their units: first the headline's, last the loss."""
    found = {
        one.name: one.unit
        for group in groups
        for run in group.runs
        for one in comparison.measures[run.directory]
        if one.section == section
    }
    first = [shown(score) for score in headline]
    order = sorted(found, key=lambda name: (name == "loss", name not in first))
    return {name: found[name] for name in order}


def users(comparison: Comparison) -> Html:
    """The scores of single users: those that runs are judged by, and the others folded away."""
    first = [f"users' {shown(score)}" for score in comparison.headline]
    found = sections(comparison, "users'")
    shown_first = [section for section in found if section.partition(",")[0] in first]
    others = [section for section in found if section not in shown_first]
    folded = tag("details", tag("summary", "Other scores of users"), measured(comparison, others))
    each = [section for score in comparison.headline for section in each_user.sections_of(score).values()]
    parts = [measured(comparison, shown_first), measured(comparison, each)]
    return join([*parts, folded] if others else parts)


def directories(comparison: Comparison) -> Html:
    """The directories of each group's runs."""
    lines = [
        join([tag("b", group.label), f", seed {run.seed}: ", tag("code", run.directory)])
        for group in comparison.groups
        for run in group.runs
    ]
    return tag("details", tag("summary", "Directories of the runs"), bullets(lines))


def sections(comparison: Comparison, first: str) -> list[str]:
    """The sections of all runs whose name begins so, in order."""
    found = [one.section for run in comparison.runs for one in comparison.measures[run.directory]]
    return [section for section in dict.fromkeys(found) if section.startswith(first)]


def configs(comparison: Comparison) -> Html:
    """The keys in which the groups' configs differ."""
    changed = comparison.differences()
    if len(comparison.groups) == 1:
        return tag("p", "There is one group, and nothing to compare its config with.")
    if not changed:
        return tag("p", "No key differs; the groups differ in their data or in the weights they began with.")
    rows = [
        [tag("code", breakable(name)), *(NONE if value is None else as_word(value) for value in values)]
        for name, values in changed.items()
    ]
    heads = ["key", *(name_of(comparison, group) for group in comparison.groups)]
    number = len({key for group in comparison.groups for key in group.keys})
    note = f"{len(changed)} of {number} keys that have an effect differ. "
    note += "A dash: the key is none or has no effect there. Seeds are not counted as a difference."
    return join([tag("p", note), table("Keys that differ", heads, rows, words=True)])


def facts(comparison: Comparison) -> Html:
    """What all groups have in common of where and with what they were made, and a table of what differs."""
    values = {
        fact: [
            list(dict.fromkeys(clean(run.outcome.get(fact, "not recorded")) for run in group.finished))
            for group in comparison.groups
        ]
        for fact in FACTS
    }
    known = {fact: {value for each in found for value in each} for fact, found in values.items()}
    same = {fact: next(iter(found)) for fact, found in known.items() if len(found) == 1}
    rows = [
        [fact, *("; ".join(_short(fact, one) for one in each) or NONE for each in found)]
        for fact, found in values.items()
        if fact not in same and any(found)
    ]
    heads = ["what", *(name_of(comparison, group) for group in comparison.groups)]
    common = bullets(join([tag("b", fact), f": {_short(fact, value)}"]) for fact, value in same.items())
    parts = [tag("p", "The same for all finished runs:"), common] if same else []
    parts += [table("Where the groups differ", heads, rows, words=True)] if rows else []
    return join(parts)


def _short(fact: str, value: str) -> str:
    if fact == "commit":
        return short_commit(value)
    return value[:12] if fact == "data_sha256" else value


def privacy(comparison: Comparison) -> Html:
    """The guarantee of each group; one sentence where none has any."""
    found = [(group, privacy_of(group)) for group in comparison.groups]
    if not any(cells for _, cells in found):
        return tag("p", "No run was trained with differential privacy: none has a guarantee.")
    rows = [[name_of(comparison, group), *(cells or ["none", *[NONE] * 4])] for group, cells in found]
    heads = ["group", "kind", "epsilon", "delta", "noise multiplier", "clipping bound"]
    note = "Epsilon is the largest over the seeds, of one run by itself: several runs together spend more."
    said = [
        tag("details", tag("summary", f"{group.label}, seed {run.seed}, in words"), tag("p", paragraph))
        for group, cells in found
        if cells
        for run in group.finished
        if (paragraph := (run.privacy or {}).get("paragraph"))
    ]
    return join([tag("p", note), table("Guarantees", heads, rows, words=True), *said])


def significance(comparison: Comparison) -> Html:
    """Every two groups of one `Group.test_key` with at least two finished seeds each, by Welch's t-test."""
    parts = [
        part
        for score in comparison.headline
        for part in (_tests(comparison, score), *_tests_of_users(comparison, score))
    ]
    shown_parts = [part for part in parts if part]
    if not shown_parts:
        sizes = ", ".join(f"{group.label}: n = {len(group.finished)}" for group in comparison.groups)
        return tag(
            "p",
            "No two groups have at least two finished seeds each on the same data and classes, so nothing "
            f"can be said about chance: one run can be lucky. Finished seeds: {sizes}.",
        )
    note = (
        f"Differences of the means over seeds with {100 * CONFIDENCE:.0f} % confidence intervals, by Welch's "
        "t-test on unrounded scores. p is the probability of at least such a difference if the two groups "
        "had the same mean; Holm's p takes all comparisons of a table into account. Seeds count as "
        "independent. Paired p is that of the paired t-test, where both groups have the same seeds: it "
        "leaves out what a seed (its partition, its first weights) does to both. It is not adjusted. "
        "With few seeds the test sees only large differences, and a large p does not say that two groups are "
        "equal. A small difference can be certain and still not matter."
    )
    return join([tag("p", note), *shown_parts])


def _tests_of_users(comparison: Comparison, score: str) -> list[Html]:
    """Tests of the means over users, each by the model that it uses, where the scores to show are given."""
    if score not in comparison.groups[0].scores:
        return []
    parts = []
    for section in in_use.sections_of(comparison, score):
        found = [in_use.by_seed(comparison, group, section, "mean") for group in comparison.groups]
        name = f"mean of {section}, each user by its own model if it has one"
        parts.append(_test_table(comparison, score, name, found))
    return parts


def _tests(comparison: Comparison, score: str) -> Html:
    found = [comparison.by_seed(group, TEST, shown(score)) for group in comparison.groups]
    return _test_table(comparison, score, f"{shown(score)} on test", found)


def _test_table(comparison: Comparison, score: str, name: str, found: Sequence[dict[int, float]]) -> Html:
    """The tests of a score, of which each group has such values by seed."""
    alike: dict[tuple[object, ...], dict[str, dict[int, float]]] = {}
    for group, values in zip(comparison.groups, found):
        if group.finished and values:
            alike.setdefault(group.test_key, {})[group.label] = values
    names = {group.label: name_of(comparison, group) for group in comparison.groups}
    unit = comparison.unit(score)
    shown_unit = "percentage points" if unit == PERCENT else unit
    tests = [test for groups in alike.values() for test in pairs(groups)]
    digits = 2 if unit == PERCENT else decimals(test.difference for test in tests)
    rows = [_test_cells(test, names, digits) for test in tests]
    heads = ["first", "second", "n", "first − second", "interval", "t", "df", "p", "Holm's p", "paired p"]
    caption = ", ".join(filter(None, [name, shown_unit]))
    return table(caption, heads, rows) if rows else Html()


def _test_cells(test: Difference, names: dict[str, Html], digits: int) -> list[object]:
    known = not math.isnan(test.p)
    return [
        names[test.first],
        names[test.second],
        f"{test.n[0]}, {test.n[1]}",
        _signed(test.difference, digits),
        f"{_signed(test.low, digits)} to {_signed(test.high, digits)}" if known else "no seed differs",
        *((_signed(test.t), f"{test.df:.2f}") if known else (NONE, NONE)),
        *(NONE if math.isnan(p) else _probability(p) for p in (test.p, test.p_holm, test.p_paired)),
    ]


def _signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _probability(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.2f}"


def csv(comparison: Comparison) -> str:
    """A line for each number of each run, unrounded."""
    return csv_table(CSV_HEAD, _csv_lines(comparison))


def _csv_lines(comparison: Comparison) -> Iterator[tuple[object, ...]]:
    for group in comparison.groups:
        for run in group.runs:
            of_run = (_cell(group.label), _cell(str(run.directory)), run.seed)
            words = "finished" if run.finished else f"not finished, {run.progress}"
            for one in comparison.measures[run.directory]:
                yield (
                    *of_run,
                    words,
                    _cell(one.section),
                    _cell(one.name),
                    _cell(one.unit or "number"),
                    one.value,
                )


def _cell(value: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    printable = clean(value)
    return f"'{printable}" if printable[:1] in ("=", "+", "-", "@") else printable
