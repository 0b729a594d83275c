"""Runs side by side: every number is the runs' own, and no name can do harm."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.compare import charts
from benchmarks.compare.__main__ import main
from benchmarks.compare.groups import Comparison
from benchmarks.compare.measures import Axis, curve, deciles, measures
from benchmarks.compare.reading import compare, read_any
from benchmarks.compare.series import line_of
from benchmarks.core.config.trees import Tree
from dataset.cli import run
from pfl_ext.algorithms.per_user import spreads_by_group
from tests.benchmarks.made_runs import make_run
from tests.benchmarks.visual_classification.test_visual_classification import made_run
from tests.browser import check_seen
from tests.page_checks import Page, check

pytestmark = pytest.mark.xdist_group("compare")  # `out` takes seconds
TRAFFIC = {"down": 4000, "up": 1000}
USERS = [5.0, 10.0, 20.0, 20.0, 95.0]
NAMES = ("C-AP", "O-AP")
OVER_BYTES = " over bytes"
HOSTILE = (
    "<script>alert(1)<",
    "<img src=x onerror=alert(1)>",
    "$x^$",
    "=1+1",
    "a\nb\u202ec",
    "x\" y='",
    "_z",
    "plain",
)


def quantiles(values: Sequence[float]) -> Tree:
    places = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)
    return {"n": len(values), "mean": statistics.fmean(values)} | {
        f"q{100 * q:g}": float(v) for q, v in zip(places, np.quantile(values, places))
    }


def whole_run(directory: Path, *argv: str, seed: int = 0, shift: float = 0.0, **more: Any) -> Path:
    """With traffic, users of rounds, and scores of single users."""
    summary = {"users": 5, "quantiles": {name: quantiles(USERS) for name in NAMES}}
    groups = spreads_by_group("abcde", "abc", np.arange(3, 8), {"O-AP": np.array(USERS)})
    more |= {"traffic": TRAFFIC, "per_user": summary, "clients": groups}
    make_run(directory, "fl-r-17", *argv, seed=seed, shift=shift, **more)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"users": 8, "lost": 2, "images": 100, "train_loss": 1 / (1 + line["round"])}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "per_user.json").write_text(json.dumps({name: [None, *USERS] for name in NAMES}))
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three groups of two benchmarks with two seeds each, a private one, and a run that has not ended."""
    top = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        whole_run(top / f"a{seed}", seed=seed, shift=float(seed))
        whole_run(top / f"b{seed}", "--local.learning_rate=0.3", seed=seed, shift=10 + 2.0 * seed)
        made_run(top / f"vision{seed}", "cifar10-fedavg", seed, 40.0 + seed)
    make_run(top / "private", "pfl-r-17")
    make_run(top / "half", "c-r-17", finished=False)
    return top


@pytest.fixture(scope="module")
def out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes of them; by themselves only charts over bytes, the others are empty files."""
    place, real = tmp_path_factory.mktemp("out"), charts.single

    def single(chart: charts.Chart, labels: Sequence[str], stem: Path) -> list[Path]:
        if chart.title.endswith(OVER_BYTES):
            return real(chart, labels, stem)
        stem.parent.mkdir(exist_ok=True)
        stem.with_suffix(".png").touch()
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "single", single)
        assert run(main, [str(folder), f"--output_dir={place}"]) == 0
    return place


@pytest.fixture(scope="module")
def page(out: Path) -> Page:
    return check((out / "compare.html").read_text())


def lines_of_csv(out: Path) -> list[dict[str, str]]:
    with (out / "compare.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_runs_that_differ_by_their_seed_alone_are_a_group(folder: Path) -> None:
    groups = {group.label: [run.seed for run in group.runs] for group in compare([folder]).groups}
    assert groups == {
        "FL-R-17, learning_rate 0.1": [0, 1],
        "FL-R-17, learning_rate 0.3": [0, 1],
        "C-R-17": [0],
        "PFL-R-17": [0],
        "cifar10-fedavg": [0, 1],
    }


def test_every_score_of_the_csv_is_the_runs_own(folder: Path, out: Path) -> None:
    found = lines_of_csv(out)
    splits = {
        "test, best model": ("test",),
        "val, best model": ("val",),
        "test, last model": ("last", "test"),
    }
    names = {"C-AP exact": "C-AP", "O-AP exact": "O-AP", "C-AP": "C-AP-binned200", "O-AP": "O-AP-binned200"}
    checked = 0
    for line in found:
        results = Path(line["run"], "results.json")
        if line["section"] in splits:
            node = json.loads(results.read_text())
            for part in splits[line["section"]]:
                node = node[part]
            assert float(line["value"]) == node[names.get(line["measure"], line["measure"])]
            checked += 1
    assert checked == sum(
        len(json.loads(path.read_text()).get(split) or ())
        for path in folder.glob("*/results.json")
        for split in ("test", "val")
    )


def test_the_tables_show_mean_and_deviation_over_seeds(folder: Path, page: Page) -> None:
    values = [json.loads((folder / f"b{s}" / "results.json").read_text())["test"]["C-AP"] for s in (0, 1)]
    rows = {row[0]: row for row in page.rows("Test, best model, judged by C-AP exact")}
    assert rows["FL-R-17, learning_rate 0.3"][1:3] == [
        "2", f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    ]  # fmt: skip
    (alone,) = [row for row in page.rows("Groups: runs that differ by their seed alone") if row[1] == "0"]
    assert alone[0] == "PFL-R-17"


def test_bytes_are_those_of_a_user_times_the_users_that_were_asked(out: Path) -> None:
    (total,) = {
        float(line["value"])
        for line in lines_of_csv(out)
        if (line["section"], line["measure"]) == ("bytes", "the whole run")
    }
    assert total == 4 * (8 + 2) * (4000 + 1000)


def test_a_vertical_round_has_the_bytes_of_its_hosts(tmp_path: Path) -> None:
    words = ("--federated.algorithm=vertical", "--model.parties=4", "--augment.flip=none")
    vertical, _ = read_any(whole_run(tmp_path / "vertical", *words))
    (total,) = [each.value for each in measures(vertical) if each[:2] == ("bytes", "the whole run")]
    assert total == 4 * (4 - 1) * (4000 + 1000)


def test_trainings_of_a_user_in_inner_rounds_all_count(tmp_path: Path) -> None:
    directory = whole_run(tmp_path / "run")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**line, "trainings": 16}) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    (trained,) = [each.value for each in measures(read_any(directory)[0]) if each.name == "users trained"]
    assert trained == 4 * 16


def test_only_keys_that_differ_are_shown_and_those_without_effect_are_not(
    folder: Path, tmp_path: Path
) -> None:
    assert compare([folder / "a0", folder / "a1"]).differences() == {}
    both = compare([folder / "a0", folder / "b0"])
    assert both.differences() == {"local.learning_rate": [0.1, 0.3]}
    idle = compare([folder / "a0", folder / "private"]).differences()
    assert idle["privacy.epsilon"] == [None, 2.0]
    assert not any(key.startswith("centralised.") for key in idle)


def test_curves_are_means_between_the_least_and_the_greatest(folder: Path) -> None:
    (group, *_) = compare([folder / "b0", folder / "b1"]).groups
    line = line_of(0, group, ("val", "C-AP"), "steps")
    assert line is not None
    assert line.x.tolist() == [0, 2]
    assert [line.low.tolist(), line.mean.tolist(), line.high.tolist()] == [[10, 30], [10, 31], [10, 32]]
    sent, minutes = (line_of(0, group, ("val", "C-AP"), axis) for axis in ("MB", "minutes"))
    assert sent is not None
    assert minutes is not None
    assert sent.x.tolist() == [0, 2 * 10 * 5000 / 1e6]
    assert minutes.x.tolist() == [0, 2 / 60]


@pytest.mark.usefixtures("no_pictures")
def test_curves_over_virtual_time_begin_where_a_round_does(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "b0", tmp_path / "b0")
    path = tmp_path / "b0" / "metrics.jsonl"
    metrics = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(metrics) > 2
    for number, line in enumerate(metrics[:-1]):
        line |= {"virtual_seconds": 60.0 * (number + 1) ** 2, "bytes_down": 7_000_000, "bytes_up": 3_000_000}
    path.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (group,) = compare([tmp_path / "b0"]).groups
    axes: tuple[Axis, ...] = ("virtual minutes", "MB", "MB from users")
    lines = [line_of(0, group, ("val", "C-AP"), axis) for axis in axes]
    assert [None if line is None else line.x.tolist() for line in lines] == [[0, 4], [0, 20], [0, 6]]
    assert line_of(0, compare([folder / "b0"]).groups[0], ("val", "C-AP"), "virtual minutes") is None
    words = [str(tmp_path / "b0"), str(folder / "a0")]
    assert run(main, [*words, f"--output_dir={tmp_path / 'page'}", "--target=25"]) == 0
    text = (tmp_path / "page" / "compare.html").read_text()
    assert "C-AP exact on val over bytes sent" in text
    page = check(text)
    rows = page.rows("25.00 % C-AP exact on val, as asked for")
    assert [row[2:] for row in rows] == [["2", "0.0333", "4", "20"], ["–"] * 4]


def test_users_are_shown_by_deciles(folder: Path, page: Page) -> None:
    record, _ = read_any(folder / "a0")
    found = deciles(record, "O-AP")
    assert found is not None
    assert found[1].tolist() == np.quantile(USERS, np.arange(11) / 10).tolist()
    (folder / "a0" / "per_user.json").rename(folder / "a0" / "away")
    shares = deciles(record, "O-AP")
    (folder / "a0" / "away").rename(folder / "a0" / "per_user.json")
    assert shares is not None
    assert shares[0] == [0, 10, 25, 50, 75, 90, 100]
    assert shares[1].tolist() == np.quantile(USERS, np.array(shares[0]) / 100).tolist()
    (row, *_) = page.rows("Users' C-AP exact")
    expected = [statistics.fmean(USERS), *np.quantile(USERS, [0.1, 0.5, 0.9]), statistics.pstdev(USERS)]
    assert row[2:] == ["5", *(f"{value:.2f} ± 0.00" for value in expected)]
    for kind, users, sizes in (("seen in training", USERS[:3], 3), ("new", USERS[3:], 6)):
        (row, *_) = page.rows(f"Users' O-AP exact, {kind}")
        expected = [np.mean(users), min(users), max(users), np.std(users)]
        assert row[2:] == [str(len(users)), str(sizes), *(f"{value:.2f} ± 0.00" for value in expected)]


@pytest.mark.usefixtures("no_pictures")
def test_users_scored_after_training_are_shown(tmp_path: Path) -> None:
    """``benchmarks.flair.per_user`` writes per_user.json alone, also before and after fine-tuning."""
    scored = make_run(tmp_path / "runs" / "scored")
    make_run(tmp_path / "runs" / "other", "fl-r-17", "--local.learning_rate=0.3")
    tuned = [value + 1 for value in USERS]
    whole: Tree = {"quantiles": {"O-AP": quantiles(USERS)}, "O-AP": USERS}
    spread = {"before": {"O-AP": quantiles(USERS)}, "after": {"O-AP": quantiles(tuned)}}
    whole["personal"] = {"quantiles": spread, "before": {"O-AP": USERS}, "after": {"O-AP": tuned}}
    (scored / "per_user.json").write_text(json.dumps(whole))
    assert run(main, [str(tmp_path / "runs"), f"--output_dir={tmp_path / 'page'}"]) == 0
    page = check((tmp_path / "page" / "compare.html").read_text())
    assert "No run scored its users" not in page.source
    deviation = f"{statistics.pstdev(USERS):.2f}"
    kinds = {
        "": USERS,
        ", held-out images before fine-tuning": USERS,
        ", held-out images after fine-tuning": tuned,
    }
    for words, users in kinds.items():
        (row,) = page.rows(f"Users' O-AP exact{words}")
        cells = [statistics.fmean(users), *np.quantile(users, [0.1, 0.5, 0.9])]
        assert row[2:] == ["5", *(f"{value:.2f}" for value in cells), deviation]


@pytest.mark.parametrize("text", ["{", "[]", '{"quantiles": {"O-AP": {"n": 3}}, "O-AP": 3, "personal": 1}'])
def test_a_damaged_file_of_users_hides_no_run(tmp_path: Path, text: str) -> None:
    (make_run(tmp_path / "run") / "per_user.json").write_text(text)
    comparison = compare([tmp_path])
    assert comparison.left_out == ()
    assert not any(one.section.startswith("users'") for one in comparison.measures[tmp_path / "run"])


def test_a_run_that_has_not_ended_is_shown_as_far_as_it_is(folder: Path, page: Page, tmp_path: Path) -> None:
    assert "1 of them has not finished" in page.source
    assert "C-R-17, seed 0: at epoch 3 of" in page.source
    whole_run(tmp_path / "0")
    going = whole_run(tmp_path / "1", seed=1)
    (going / "results.json").unlink()
    (going / "checkpoint").mkdir()
    (going / "checkpoint" / "data.json").write_text('{"sha256": "f1"}')
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "val": {"C-')
    (group,) = compare([tmp_path]).groups
    assert [run.seed for run in group.finished] == [0]
    assert group.unfinished[0].progress.startswith("at round 3 of")
    line = line_of(0, group, ("val", "C-AP"), "steps")
    assert line is not None
    assert (line.n, len(line.singles)) == (1, 1)


def test_what_cannot_be_shown_is_named_and_the_rest_is_shown(folder: Path, tmp_path: Path) -> None:
    whole_run(tmp_path / "whole")
    whole_run(tmp_path / "same", shift=1.0)
    damaged = whole_run(tmp_path / "worse", "--local.learning_rate=0.3")
    (damaged / "metrics.jsonl").write_text("{")
    words = whole_run(tmp_path / "words", "--local.learning_rate=0.2")
    results = json.loads((words / "results.json").read_text())
    (words / "results.json").write_text(json.dumps({**results, "traffic": "much"}))
    found = compare([tmp_path])
    assert len(found.groups) == 1
    assert sorted(line.removeprefix(str(tmp_path)).split()[0] for line in found.left_out) == [
        "/whole", "/words", "/worse",
    ]  # fmt: skip
    assert any(f"repeats {tmp_path / 'same'}: same config and seed" in line for line in found.left_out)


def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Runs that only three keys together tell apart, so that groups have the names of their directories."""
    monkeypatch.setattr("benchmarks.compare.groups.MOST_KEYS", 2)
    keys = ("local.num_epochs", "local.batch_size", "federated.cohort_size")
    for values, name in zip(itertools.product((1, 2), repeat=3), HOSTILE, strict=True):
        argv = [f"--{key}={value}" for key, value in zip(keys, values)]
        whole_run(tmp_path / "runs" / name, *argv)
    whole_run(tmp_path / "runs" / os.fsdecode(b"\xff"), "--setting=</title><script>alert(1)</script>")
    return compare([tmp_path / "runs"])


@pytest.mark.usefixtures("one_chart")
def test_names_can_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = hostile(tmp_path, monkeypatch)
    assert len(comparison.groups) == len(HOSTILE) + 1
    assert run(main, [str(tmp_path / "runs"), f"--output_dir={tmp_path / 'out'}"]) == 0
    text = (tmp_path / "out" / "compare.html").read_text()
    page = check(text)
    labels = [row[0] for row in page.rows("Groups: runs that differ by their seed alone")]
    assert "FL-R-17 (<script>alert(1)<)" in labels
    assert "FL-R-17 (a\ufffdb\ufffdc)" in labels
    assert "</title><script>alert(1)</script>" in labels
    assert "<script" not in text
    assert "onerror=alert(1)>" not in text
    for line in lines_of_csv(tmp_path / "out"):
        assert not any(line[name].startswith(("=", "+", "-", "@")) for name in ("group", "run", "measure"))


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_called_like_a_formula_is_text_in_the_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run(tmp_path / "=1+1")
    monkeypatch.chdir(tmp_path)
    assert run(main, ["=1+1"]) == 0
    assert {line["run"] for line in lines_of_csv(tmp_path / "compare")} == {"'=1+1"}


@pytest.mark.usefixtures("page_alone")
def test_the_page_is_the_same_every_time_and_bounded(
    folder: Path, out: Path, page: Page, tmp_path: Path
) -> None:
    assert run(main, [str(folder), f"--output_dir={tmp_path}"]) == 0
    for name in ("compare.html", "compare.csv"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()
    assert (out / "compare.html").stat().st_size < 500_000
    with Image.open(out / "compare.png") as picture:
        assert picture.width > 1000
    command = f"% made by: python -m benchmarks.compare {folder} --output_dir={tmp_path}\n"
    assert command in (tmp_path / "table.tex").read_text()
    assert len(list((out / "charts").glob("*.png"))) == page.source.count("<figcaption") > 9
    for suffix in ("png", "svg", "pdf"):
        assert (out / "charts" / f"c-ap-exact-on-val-over-bytes.{suffix}").stat().st_size > 0


@pytest.mark.usefixtures("no_pictures")
def test_when_a_score_was_reached(folder: Path, tmp_path: Path) -> None:
    words = [str(folder / name) for name in ("a0", "b0")]
    assert run(main, [*words, f"--output_dir={tmp_path}", "--target=25"]) == 0
    page = check((tmp_path / "compare.html").read_text())
    rows = page.rows("25.00 % C-AP exact on val, as asked for")
    assert [row[2:] for row in rows] == [["–", "–", "–"], ["2", "0.0333", "0.1"]]


@pytest.mark.usefixtures("no_pictures")
def test_a_score_that_all_have_untrained_is_no_target(tmp_path: Path) -> None:
    """Both begin at 10 %, and one ends at 5 %."""
    for name, shift in (("worse", -15.0), ("better", 5.0)):
        make_run(tmp_path / name, "fl-r-17", f"--local.learning_rate={0.1 + shift / 1000}", shift=shift)
    assert run(main, [str(tmp_path), f"--output_dir={tmp_path / 'out'}"]) == 0
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "which all groups reach" not in page


def test_a_browser_shows_it(out: Path) -> None:
    check_seen(out / "compare.html")


def test_a_curve_without_numbers_is_none(folder: Path) -> None:
    record, _ = read_any(folder / "a0")
    assert curve(record, "val", "no score") is None
    assert curve(record, "nothing") is None
