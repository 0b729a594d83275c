"""Figures from a file and from made-up runs: which are written, and that they show what was given."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.core import mini
from benchmarks.flair import figures
from benchmarks.flair.figures import main, per_class, private, user_sizes
from benchmarks.flair.report import collect
from dataset.cli import run
from dataset.flair.mini import MiniSpec
from tests.benchmarks.made_runs import LOCALLY, PRIVACY, make_run


def written(directory: Path) -> set[str]:
    """The figures' names; each is there as a PNG that is not of one colour and as well-formed SVG."""
    names = {path.stem for path in directory.glob("*.png")}
    assert {path.stem for path in directory.glob("*.svg")} == names
    for name in names:
        pixels = np.asarray(Image.open(directory / f"{name}.png").convert("L"))
        assert min(pixels.shape) > 400
        assert pixels.std() > 5
        assert ElementTree.parse(directory / f"{name}.svg").getroot().tag.endswith("svg")
    return names


def per_user_file(directory: Path, shift: float) -> None:
    values = {name: [10.0 + shift, 20.0, 30.0, 99.0] for name in ("C-AP", "O-AP")}
    (directory / "per_user.json").write_text(json.dumps({"images": [5, 2, 3, 1], **values}))


def test_all_figures_are_written_from_a_file_and_runs(mini_file: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        per_user_file(make_run(tmp_path / "runs" / f"fl{seed}", seed=seed, shift=seed), seed)
        make_run(tmp_path / "runs" / f"pfl{seed}", "pfl-r-17", seed=seed, shift=-10 - seed)
        make_run(
            tmp_path / "runs" / f"large{seed}", "pfl-r-17", "--privacy.noise_cohort_size=20000", seed=seed
        )
    make_run(tmp_path / "runs" / "none", "pfl-r-17", "--privacy=none")
    out = tmp_path / "figures"
    assert run(main, [str(tmp_path / "runs"), f"--data_path={mini_file}", f"--output_dir={out}"]) == 0
    assert written(out) == {"user_sizes", "labels", "emd", "per_class", "per_user", "private"}
    text = (out / "private.svg").read_text()
    assert "<path" in text


def test_the_same_data_gives_the_same_files(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    for name in ("one", "two"):
        run(main, [str(tmp_path / "runs"), "--output_dir", str(tmp_path / name)])
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_per_class_shows_the_mean_over_seeds_of_each_class_the_commonest_first(tmp_path: Path) -> None:
    make_run(tmp_path / "a", seed=0)
    make_run(tmp_path / "b", seed=1, shift=10.0)
    axes = per_class(collect([tmp_path]).rows, "name").axes[0]
    assert [tick.get_text().split()[0] for tick in axes.get_xticklabels()] == ["food", "animal", "fire"]
    mean = axes.get_lines()[0].get_ydata()
    np.testing.assert_allclose(np.asarray(mean), [60, 45, 5])  # animal is 40 and 50
    assert axes.get_legend_handles_labels()[1][0] == "FL-R-17 (n = 2)"


def test_classes_without_an_image_on_test_are_named_not_drawn(tmp_path: Path) -> None:
    prevalence = {"animal": 0.2, "food": 0.3, "fire": 0.0}
    make_run(tmp_path / "a", prevalence=prevalence)
    axes = per_class(collect([tmp_path]).rows, "name").axes[0]
    assert [tick.get_text().split()[0] for tick in axes.get_xticklabels()] == ["food", "animal"]
    assert axes.get_title() == "name; not on test: fire"


def test_many_classes_are_drawn_against_their_frequency(tmp_path: Path) -> None:
    prevalence = {f"c{k}": 0.5 / (k + 1) for k in range(50)}
    ap = dict.fromkeys(prevalence, 30.0)
    make_run(tmp_path / "a", "fl-r-1628", prevalence=prevalence, per_class_ap=ap)
    axes = per_class(collect([tmp_path]).rows, "name").axes[0]
    assert axes.get_xscale() == "log"
    np.testing.assert_allclose(np.sort(np.asarray(axes.get_lines()[0].get_xdata())), sorted(
        100 * value for value in prevalence.values()))  # fmt: skip
    np.testing.assert_allclose(np.asarray(axes.get_lines()[1].get_ydata()), 30.0)


def test_private_runs_stand_at_their_noise_cohort_with_their_ratio(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "pfl-r-17")
    make_run(tmp_path / "b", "pfl-r-17", "--privacy.noise_cohort_size=20000", shift=7.0)
    statement = {**PRIVACY, "by_round": {"signal-to-noise ratio": [2.0, None, 4.0]}}
    (tmp_path / "b" / "privacy.json").write_text(json.dumps(statement))
    made = private(collect([tmp_path]).rows, "name")
    assert made is not None
    curves, ends, ratios = made.axes
    assert len(curves.get_lines()) == 2
    for axes, expected in ((ends, [20.0, 27.0]), (ratios, [0.2, 3.0])):
        points = [line for line in axes.get_lines() if line.get_marker() in ("o", "s")]
        np.testing.assert_allclose([float(np.asarray(p.get_ydata())[0]) for p in points], expected)
        np.testing.assert_allclose(
            [float(np.asarray(p.get_xdata())[0]) for p in points], [5000, 20000], rtol=0.05
        )
    assert figures.private([], "none") is None


def test_local_privacy_is_neither_among_the_private_runs_nor_their_line_without_noise(tmp_path: Path) -> None:
    make_run(tmp_path / "local", "pfl-r-17", *LOCALLY)
    assert private(collect([tmp_path]).rows, "name") is None
    make_run(tmp_path / "central", "pfl-r-17")
    make_run(tmp_path / "none", "pfl-r-17", "--privacy=none", shift=3.0)
    made = private(collect([tmp_path]).rows, "name")
    assert made is not None
    last = sorted(float(np.asarray(line.get_ydata())[-1]) for line in made.axes[0].get_lines())
    assert last == [20.0, 23.0]


def test_the_mini_data_set_is_drawn_where_it_is_not_yet(
    mini_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def draw(path: Path, spec: MiniSpec) -> None:
        path.write_bytes(mini_file.read_bytes())

    monkeypatch.setattr(mini, "write_mini", draw)
    assert run(main, ["--data_path=mini", "--output_dir=out"]) == 0
    assert written(Path("out")) == {"user_sizes", "labels", "emd"}


def test_the_names_of_figures_say_in_what_several_of_a_kind_differ(tmp_path: Path) -> None:
    ap, prevalence = {"a": 3.0, "b": 4.0}, {"a": 0.1, "b": 0.2}
    make_run(tmp_path / "runs" / "a", "fl-r-17")
    make_run(tmp_path / "runs" / "b", "fl-r-1628", per_class_ap=ap, prevalence=prevalence)
    names = [name for name, _ in figures.run_figures([tmp_path / "runs"])]
    assert names == ["per_class_3", "per_class_2"]
    make_run(tmp_path / "runs" / "c", "fl-r-17", data={"content_sha256": "x"}, dataset="else/other.hdf5")
    names = [name for name, _ in figures.run_figures([tmp_path / "runs"])]
    assert sorted(names) == ["per_class_flair_2", "per_class_flair_3", "per_class_other_3"]


def test_scores_stay_inside_their_panels(tmp_path: Path) -> None:
    per_user_file(make_run(tmp_path / "a", "pfl-r-17"), 0.0)
    rows = collect([tmp_path]).rows
    curves = private(rows, "name")
    violins = figures.per_user(rows, "name")
    assert curves is not None
    assert violins is not None
    assert curves.axes[0].get_ylim() == pytest.approx((0, 21.2))  # the curve ends at 20
    assert violins.axes[0].get_ylim() == pytest.approx((0, 34))  # 30 is the most of users with two images


def test_the_legend_says_who_holds_half_of_the_images() -> None:
    labels = user_sizes({"train": np.array([6, 1, 1, 2])}, "x").axes[0].get_legend_handles_labels()[1]
    assert labels[0] == "train: 4 users, half of the images with 25 % of them"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--output_dir=x"], "nothing to draw"),
        (["RUNS", "--output_dir=x"], "no finished run"),
        (["--data_path=nowhere.hdf5", "--output_dir=x"], "nowhere.hdf5: no such file"),
    ],
)
def test_a_mistake_is_named(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "half", finished=False)
    assert run(main, [word.replace("RUNS", str(tmp_path)) for word in argv]) == 2
    assert message in capsys.readouterr().err
