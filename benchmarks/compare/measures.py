"""The numbers of a run that are compared, each with its section, name and unit; and its curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.compare import each_user
from benchmarks.core.config.trees import Tree
from benchmarks.reporting import single_users
from benchmarks.reporting.runs import DAMAGE, RunRecord, epsilon_of, local_epsilon_of, reading
from dataset.arrays import FloatArray, IntArray
from dataset.pages import bytes_in_words
from pfl_ext.tasks.multi_label_scores import shown
from pfl_ext.tasks.score_kinds import LOSS, PERCENT, USUAL, ScoreKinds, decimals


class Declared(str):
    """The unit that a task declares for a score; empty for a plain number."""


Unit = Literal["percent", "loss", "seconds", "bytes", "count", "number"] | Declared
SPLITS = {"test": "test, best model", "val": "val, best model", "last": "test, last model"}
"""The tables of scores."""
BY_CLASS = {
    "per_class_accuracy": "accuracy of each class on test, best model",
    "per_class_iou": "IoU of each class on test, best model",
    "per_class_dice": "Dice score of each class on test, best model",
    "per_class_sensitivity": "sensitivity of each class on test, best model",
    "per_class_specificity": "specificity of each class on test, best model",
    "per_class_ap": "AP of each class on test, best model",
    "per_class_ap50": "AP50 of each class on test, best model",
}
"""The tables of scores of single classes, by the key of ``results.json``."""
FAIR = {"mean": "mean", "q10": "worst decile ends", "q50": "median", "q90": "best decile begins"}
"""What is shown of the scores of single users, by the key of ``results.json``."""
FAIR_IF_LOWER = {**FAIR, "q10": "best decile ends", "q90": "worst decile begins"}
"""The same where a lower score is better."""
FINE_TUNING = {
    "": "",
    "before": ", held-out images before fine-tuning",
    "after": ", held-out images after fine-tuning",
}
"""Which scores of single users ``per_user.json`` has, and how a table's title says it."""
DECILES = tuple(range(0, 101, 10))


class Measure(NamedTuple):
    """One number of one run."""

    section: str
    """The table that it stands in."""
    name: str
    """The name of the column."""
    unit: Unit
    value: float


Axis = Literal["steps", "minutes", "virtual minutes", "MB", "MB from users", "epsilon", "simulated epsilon"]
"""Along what a curve is drawn: updates of the model; minutes of training, minutes of the run's devices, MB
between server and users, and those from users, all before each model; a model's epsilon, of the run as
executed and of the larger system that it simulates."""


class Curve(NamedTuple):
    """A score of the models of a run."""

    values: FloatArray  # [n]
    along: Mapping[Axis, FloatArray]  # [n]; without axes that are not known, or that the run does not have


def _users_file(run: RunRecord) -> Tree:
    """``per_user.json``; empty where it is missing, damaged, or of other data than the run's."""
    with suppress(*DAMAGE):
        return run.single_users
    return {}


def per_user(run: RunRecord, when: str = "") -> Tree:
    """What is known of single users, by score: number, mean and quantiles; else empty.

    It is in ``per_user.json`` or, without that, in ``results.json``.

    Args:
        run: that has ended.
        when: a key of `FINE_TUNING`: of users' held-out images; empty: of all users.
    """
    whole: Any
    for whole in (_users_file(run), run.outcome.get("per_user")):
        found: Tree = {}
        with suppress(*DAMAGE):
            part = whole["personal"]["quantiles"][when] if when else whole["quantiles"]
            for name, values in part.items():
                if values.get("n") and FAIR.keys() <= values.keys():
                    found[name] = {key: float(value) for key, value in values.items()}
        if found:
            return found
    return {}


def measures(run: RunRecord, kinds: ScoreKinds = USUAL) -> list[Measure]:
    """All numbers of a run; of one that has not ended, what its lines say.

    Args:
        run: is read.
        kinds: how its scores are read.

    Raises:
        ValueError: when its files hold something else than numbers there.
    """
    with reading(run.directory):
        return [Measure(*each[:3], float(each.value)) for each in _measures(run, kinds)]


def _measures(run: RunRecord, kinds: ScoreKinds) -> Iterator[Measure]:
    if run.results is not None:
        yield from _scores(run.results, kinds)
        yield from _scores_of_classes(run.results)
        for when, words in FINE_TUNING.items():
            for name, values in per_user(run, when).items():
                section, unit = f"users' {shown(name)}{words}", unit_of(name, kinds)
                yield Measure(section, "users", "count", values["n"])
                for key, head in (FAIR_IF_LOWER if kinds.is_lower_better(name) else FAIR).items():
                    yield Measure(section, head, unit, values[key])
                if (deviation := _deviation_of_users(run, name, when)) is not None:
                    yield Measure(section, "standard deviation", unit, deviation)
        for each in single_users.of_run(run):
            section = f"users' {shown(each.score)}, {each.kind}"
            for key, value in each.values.items():
                head = single_users.column(key, kinds.is_lower_better(each.score))
                yield Measure(section, head, _unit_of_users(key, each.score, kinds), value)
        for one in each_user.scores_of(run):
            section = each_user.section_of(one.name, one.kind)
            yield Measure(section, one.user, unit_of(one.name, kinds), one.value)
    yield from _time(run)
    yield from _traffic(run)
    yield from _cost(run)
    if run.privacy is not None:
        yield from _privacy(run, run.privacy)


def without_repeated_last(found: Mapping[Path, Sequence[Measure]]) -> dict[Path, Sequence[Measure]]:
    """The measures of runs, by directory, without those of the last model where no run has a better one.

    Where some run has, all are kept: their mean must be over all seeds.
    """
    if any(_scores_in(each, "last") not in ({}, _scores_in(each, "test")) for each in found.values()):
        return dict(found)
    return {path: [one for one in each if one.section != SPLITS["last"]] for path, each in found.items()}


def _scores_in(found: Sequence[Measure], split: str) -> dict[str, float]:
    return {one.name: one.value for one in found if one.section == SPLITS[split]}


def unit_of(score: str, kinds: ScoreKinds) -> Unit:
    """The unit of a score, for people and for the CSV."""
    if score == LOSS and LOSS not in kinds.units:
        return "loss"
    unit = kinds.unit(score)
    return "percent" if unit == PERCENT else Declared(unit)


def _unit_of_users(key: str, score: str, kinds: ScoreKinds) -> Unit:
    if key in single_users.COUNTS:
        return "count"
    if key == "variance without noise":
        return "number"
    return unit_of(score, kinds)


def _scores(results: Tree, kinds: ScoreKinds) -> Iterator[Measure]:
    tables = {"test": results.get("test"), "val": results.get("val")}
    tables["last"] = (results.get("last") or {}).get("test")
    if tables["last"] is None and results.get("best_step") == results.get("rounds", -1):
        tables["last"] = tables["test"]
    for split, scores in tables.items():
        for name, value in (scores or {}).items():
            yield Measure(SPLITS[split], shown(name), unit_of(name, kinds), value)


def _scores_of_classes(results: Tree) -> Iterator[Measure]:
    """The score of each class that test has, where it is known."""
    prevalence = results.get("prevalence") or {}
    for key, section in BY_CLASS.items():
        for name, value in (results.get(key) or {}).items():
            if value is not None and math.isfinite(value) and prevalence.get(name) != 0:
                yield Measure(section, name, "percent", value)


def _time(run: RunRecord) -> Iterator[Measure]:
    if run.results is not None and "wall_clock_s" in run.results:
        yield Measure("time", "wall clock", "seconds", run.results["wall_clock_s"])
    virtual = [line["virtual_seconds"] for line in _history(run) if "virtual_seconds" in line]
    if virtual:
        yield Measure("time", "virtual, the whole run", "seconds", virtual[-1])
    seconds = [line["seconds"] for line in _history(run) if "seconds" in line]
    if seconds:
        yield Measure("time", f"{run.config.unit}, median", "seconds", statistics.median(seconds))


def _traffic(run: RunRecord) -> Iterator[Measure]:
    traffic = (run.results or {}).get("traffic")
    if traffic is None:
        return
    yield Measure("bytes", "down, a user and round", "bytes", traffic["down"])
    yield Measure("bytes", "up, a user and round", "bytes", traffic["up"])
    rounds = _bytes_by_step(run)
    if rounds is not None:
        yield Measure("bytes", "the whole run", "bytes", sum(rounds))


def _cost(run: RunRecord) -> Iterator[Measure]:
    results, history = run.results or {}, _history(run)
    steps = [line for line in history if len(line) > 1 and line[run.config.unit] < run.config.num_steps]
    yield Measure("cost", f"{run.config.unit}s done", "count", len(steps))
    trained = {
        "images trained on": [line.get("images") for line in steps],
        "users trained": [line.get("trainings", line.get("users")) for line in steps],
    }
    for name, counts in trained.items():
        if known := [count for count in counts if count is not None]:
            yield Measure("cost", name, "count", sum(known))
    if any("selected" in line for line in steps):
        for key, name in (("selected", "users asked"), ("lost", "dropped out"), ("late", "late")):
            yield Measure("cost", name, "count", sum(line.get(key, 0) for line in steps))
    for key, name in (("parameters", "parameters"), ("trainable_parameters", "of them trained")):
        if key in results:
            yield Measure("cost", name, "count", results[key])


def _privacy(run: RunRecord, statement: Tree) -> Iterator[Measure]:
    if run.config.local_privacy is not None:
        one, delta, most, spent = local_epsilon_of(statement)
        yield Measure("privacy", "epsilon of one update", "number", one)
        yield Measure("privacy", "epsilon of who took part most", "number", spent)
        yield Measure("privacy", "rounds of who took part most", "count", most)
    else:
        total, delta, simulated, executed = epsilon_of(statement)
        if simulated:
            yield Measure("privacy", "epsilon, simulated", "number", total)
        yield Measure("privacy", "epsilon, as executed", "number", executed)
    yield Measure("privacy", "delta", "number", delta)


def _history(run: RunRecord) -> list[Tree]:
    return run.history if (run.directory / "metrics.jsonl").exists() else []


def _bytes_by_step(run: RunRecord, ways: Sequence[str] = ("down", "up")) -> list[float] | None:
    """Bytes of each round: what a user receives and sends, times the users that were asked.

    Those that dropped out count as the others: at most they have sent all. None where it is not known. On
    simulated devices the line says it. Of vertical federated learning the traffic is a host's.
    """
    traffic = (run.results or {}).get("traffic")
    lines = [line for line in _history(run) if "users" in line]
    if traffic is None or not lines:
        return None
    config = run.config
    hosts = (config.model.parties or 1) - 1 if config.federated.algorithm == "vertical" else None
    return [
        float(sum(line[f"bytes_{way}"] for way in ways))
        if "bytes_down" in line
        else float(
            (line["users"] + line.get("lost", 0) if hosts is None else hosts)
            * sum(traffic[way] for way in ways)
        )
        for line in lines
    ]


def _users_of(run: RunRecord, score: str, when: str = "") -> FloatArray | None:
    """The score of each user that has one, from ``per_user.json``; None where that cannot be used."""
    with suppress(*DAMAGE):
        whole = _users_file(run)
        values = (whole["personal"][when] if when else whole)[score]
        found = np.array([value for value in values if value is not None], np.float64)
        return found if len(found) and np.isfinite(found).all() else None
    return None


def _deviation_of_users(run: RunRecord, score: str, when: str) -> float | None:
    users = _users_of(run, score, when)
    return None if users is None or len(users) < 2 else float(users.std())


def deciles(run: RunRecord, score: str) -> tuple[Sequence[float], FloatArray] | None:
    """Shares of the users in percent, and the score that so many are at or below; None where not known.

    From ``per_user.json``, at every tenth; without it, from the quantiles of ``results.json``.
    """
    users = _users_of(run, score)
    if users is not None:
        return DECILES, np.quantile(users, np.array(DECILES) / 100)
    values = per_user(run).get(score, {})
    places = {float(key[1:]): value for key, value in values.items() if key.startswith("q")}
    return (sorted(places), np.array([places[key] for key in sorted(places)])) if places else None


def followed(run: RunRecord) -> tuple[str, str] | None:
    """The key under which a run's lines keep the scores over its steps, and the split that these are of."""
    lines = _history(run)
    if any("tracked" in line for line in lines):
        return "tracked", "test"
    return ("val", "val") if any("val" in line for line in lines) else None


def curve(run: RunRecord, *keys: str) -> Curve | None:
    """What the lines of a run have at this path of keys; None where some lines with the first of the keys
    lack the second, as of a run that an earlier version began.

    Raises:
        ValueError: when such a line has no number there.
    """
    lines = [line for line in _history(run) if keys[0] in line]
    if not lines or (len(keys) > 1 and not all(keys[1] in line[keys[0]] for line in lines)):
        return None
    steps, values = run.series(*keys)
    known = np.isfinite(values)
    places = np.array(steps)[known]
    along: dict[Axis, FloatArray] = {"steps": places.astype(float)}
    ends = [float(line["virtual_seconds"]) for line in _history(run) if "virtual_seconds" in line]
    by_step: dict[Axis, tuple[Sequence[float] | None, float]] = {
        "minutes": ([float(line["seconds"]) for line in _history(run) if "seconds" in line], 60),
        "virtual minutes": (np.diff(ends, prepend=0).tolist(), 60),
        "MB": (_bytes_by_step(run), 1e6),
        "MB from users": (_bytes_by_step(run, ["up"]), 1e6),
    }
    along |= {axis: _before(each, places) / unit for axis, (each, unit) in by_step.items() if each}
    names: dict[Axis, str] = {"epsilon": "epsilon", "simulated epsilon": "simulated_epsilon"}
    with reading(run.directory):
        spent = {
            axis: np.array([float(line.get(name, np.nan)) for line in lines]) for axis, name in names.items()
        }
    along |= {axis: each[known] for axis, each in spent.items() if np.isfinite(each).all()}
    return Curve(values[known], along)


def _before(of_steps: Sequence[float], places: IntArray) -> FloatArray:
    """The sums before each of these steps."""
    sums = np.concatenate([[0.0], np.cumsum(of_steps)])
    return np.asarray(sums[np.minimum(places, len(sums) - 1)], np.float64)


def in_words(values: Sequence[float], unit: Unit) -> str:
    """``mean ± standard deviation`` (n - 1) in the unit; one value by itself; a dash without any."""
    if not values:
        return "–"
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else None
    if unit == "bytes":
        return bytes_in_words(mean) + (f" ± {bytes_in_words(deviation)}" if deviation else "")
    scale, digits, suffix = _scale(mean, deviation or 0.0, unit)
    shown_mean = f"{mean / scale:,.{digits}f}"
    if deviation is None or (unit == "count" and deviation == 0):
        return shown_mean + suffix
    return f"{shown_mean} ± {deviation / scale:,.{digits}f}{suffix}"


def _scale(mean: float, deviation: float, unit: Unit) -> tuple[float, int, str]:
    """The number to divide by, the number of decimals, and the unit's suffix."""
    if isinstance(unit, Declared):
        return 1, decimals([mean, deviation]), ""
    if unit == "seconds":
        if mean >= 2 * 3600:
            return 3600, 1, " h"
        return (60, 1, " min") if mean >= 120 else (1, 1 if mean >= 10 else 2, " s")
    return 1, {"percent": 2, "loss": 4, "count": 0}.get(unit, 3), ""
