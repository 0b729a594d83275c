from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.core.config.trees import Tree
from benchmarks.flair.private_figure import against_epsilon, main, picture, read_private, table
from tests.benchmarks.made_runs import make_run


def run_directory(
    path: Path,
    epsilon: float | None,
    rounds: int,
    section: str = "privacy",
    seed: int = 0,
    score: float = 10.0,
) -> Path:
    """As a finished run leaves it, with lines of so many rounds."""
    words = ["--federated.weighting=users", *([] if epsilon is None else [f"--{section}.epsilon={epsilon}"])]
    make_run(path, "fl-r-17", *words, seed=seed)
    lines: list[Tree] = []
    for r in range(rounds):
        metrics = {"clipping bound": 0.1 + r, "fraction clipped": 0.5, "signal-to-noise ratio": 2.0 / (r + 1)}
        lines.append({"round": r, **({} if epsilon is None else {"privacy": metrics})})
    lines[0]["val"] = {"C-AP": 12.5}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = json.loads((path / "results.json").read_text())
    columns = {"C-AP": score, "O-AP": 2 * score}
    (path / "results.json").write_text(json.dumps({**results, "val": columns, "test": columns}))
    return path


def test_each_private_run_has_a_curve_in_each_panel_and_a_public_one_in_the_last(tmp_path: Path) -> None:
    given = [("a", 2.0, 4), ("b", 8.0, 3), ("c", None, 5)]
    figure = picture([read_private(run_directory(tmp_path / n, epsilon, t)) for n, epsilon, t in given])
    bound, clipped, ratio, scores = figure.axes
    assert [np.asarray(line.get_ydata()).tolist() for line in bound.lines][:2] == [
        [0.1, 1.1, 2.1, 3.1],
        [0.1, 1.1, 2.1],
    ]
    assert np.asarray(ratio.lines[1].get_ydata()).tolist() == [2.0, 1.0, 2.0 / 3]
    assert [len(np.asarray(line.get_xdata())) for line in scores.lines] == [1, 1, 1]
    colours = [line.get_color() for line in scores.lines]
    assert len(set(colours)) == 3
    assert [line.get_color() for line in clipped.lines][:2] == colours[:2]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "epsilon 2",
        "epsilon 8",
        "no privacy",
    ]


def test_the_table_has_the_mean_of_finished_seeds_of_each_budget(tmp_path: Path) -> None:
    given = [("a", 2.0, 4, 10.0), ("b", 2.0, 4, 13.0), ("c", None, 2, 40.0), ("d", 8.0, 2, None)]
    for seed, (name, epsilon, rounds, score) in enumerate(given):
        directory = run_directory(tmp_path / name, epsilon, rounds, seed=seed, score=score or 0.0)
        if score is None:
            (directory / "results.json").unlink()
    _, _, *rows = table([read_private(tmp_path / name) for name, *_ in given]).splitlines()
    assert rows == [
        "| none | 2 | 40.0 | 40.0 | 80.0 | - | - | - |",
        "| 2 | 0, 1 | 11.5 ± 2.1 | 11.5 ± 2.1 | 23.0 ± 4.2 | 0.83 ± 0.00 | 0.50 ± 0.00 | 3.10 ± 0.00 |",
    ]


def test_scores_stand_over_their_budgets(tmp_path: Path) -> None:
    given = [(8.0, 0, 30.0), (2.0, 0, 10.0), (2.0, 1, 14.0), (None, 2, 40.0)]
    directories = [
        run_directory(tmp_path / f"{epsilon}-{seed}", epsilon, 3, seed=seed, score=score)
        for epsilon, seed, score in given
    ]
    local = run_directory(tmp_path / "local", 4.0, 3, "local_privacy", score=5.0)
    axes = against_epsilon([read_private(path) for path in [*directories, local]]).axes[0]
    drawn = {str(line.get_label()): line for line in axes.lines}
    assert np.array_equal(drawn["test"].get_xydata(), [[2, 12], [8, 30]])
    assert np.array_equal(drawn["val, local"].get_xydata(), [[4, 5]])
    assert set(np.asarray(drawn["test, no privacy"].get_ydata())) == {40.0}
    with pytest.raises(ValueError, match="none of these runs is private and finished"):
        against_epsilon([read_private(directories[-1])])


def test_local_privacy_is_a_budget_apart_and_not_for_want_of_privacy(tmp_path: Path) -> None:
    run_directory(tmp_path / "central", 8.0, 3)
    run_directory(tmp_path / "local", 8.0, 3, "local_privacy")
    run_directory(tmp_path / "none", None, 3)
    runs = [read_private(tmp_path / name) for name in ("central", "local", "none")]
    assert [line.split(" | ")[0] for line in table(runs).splitlines()[2:]] == [
        "| none", "| 8", "| local, 8 an update"]  # fmt: skip
    figure = picture(runs)
    assert len({line.get_color() for line in figure.axes[3].lines}) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "epsilon 8", "no privacy", "local, epsilon 8 an update"]  # fmt: skip


def test_the_picture_is_written_and_a_mistake_is_named(tmp_path: Path) -> None:
    run_directory(tmp_path / "a", 2.0, 3)
    main([str(tmp_path / "out.png"), str(tmp_path / "a")])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="is not a complete run"):
        main([str(tmp_path / "out.png"), str(tmp_path)])
    with pytest.raises(ValueError, match="arguments are required: RUN_DIR"):
        main([str(tmp_path / "out.png")])
    other = run_directory(tmp_path / "other", 2.0, 3, seed=1)
    main([str(tmp_path / "out.png"), str(tmp_path / "a"), str(other)])
    same = run_directory(tmp_path / "same", 2.0, 3)
    with pytest.raises(ValueError, match="have the same config and the same seed"):
        main([str(tmp_path / "out.png"), str(tmp_path / "a"), str(same)])
    words = ["--privacy.epsilon=2", "--privacy.noise_cohort_size=200", "--federated.weighting=users"]
    different = make_run(tmp_path / "different", "fl-r-17", *words, seed=1)
    (different / "metrics.jsonl").write_text((other / "metrics.jsonl").read_text())
    with pytest.raises(ValueError, match="differ in more than the seed"):
        main([str(tmp_path / "out.png"), str(tmp_path / "a"), str(different)])
