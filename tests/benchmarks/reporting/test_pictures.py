"""What the pictures of a run show, and what they do not pretend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from benchmarks.reporting import pictures, plots


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be written."""
    figures: list[Figure] = []
    for module in (plots, pictures):
        monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure))
    return figures


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("users", [1, plots.FEW_USERS - 1, plots.FEW_USERS])
def test_few_users_are_points_and_many_a_density(drawn: list[Figure], users: int) -> None:
    values = np.append(np.linspace(10.0, 90.0, users), np.nan)
    for _ in range(2):
        plots.per_user_violins({"all users": values, "nobody": values[-1:]}, "score", "t", Path("p"))
    points, again = [
        [line.get_xydata() for line in figure.axes[0].lines if len(np.asarray(line.get_xdata())) == users]
        for figure in drawn
    ]
    few = users < plots.FEW_USERS
    assert bool(drawn[0].axes[0].collections) != few, "a shape and a box"
    assert ("one user" in legend(drawn[0]), "middle half of the users" in legend(drawn[0])) == (few, not few)
    if few:
        first = np.asarray(points[0])
        assert first[:, 1].tolist() == values[:-1].tolist()
        assert np.abs(first[:, 0]).max() < 0.3, "beside its own place alone"
        np.testing.assert_array_equal(first, np.asarray(again[0]))


def test_a_class_that_test_lacks_has_no_bar(drawn: list[Figure]) -> None:
    plots.per_class_bars(("a", "b", "c"), (40.0, 0.0, 0.0), (0.5, 0.0, 0.2), {}, "t", Path("p"))
    axes = drawn[0].axes[0]
    heights = [float(bar.get_height()) for bar in axes.containers[0]]
    assert heights[:2] == [40.0, 0.0]
    assert np.isnan(heights[2])
    assert [(text.get_text(), text.get_position()[0]) for text in axes.texts] == [("none", 2)]


@pytest.mark.parametrize("void", [False, True])
def test_a_mask_without_classes_is_in_the_legend(drawn: list[Figure], void: bool) -> None:
    truth = np.array([[[0, 1], [1, 255 if void else 2]]] * 2, np.uint8)
    images, predicted = np.zeros((2, 2, 2, 3), np.float32), np.ones((2, 2, 2), np.int64)
    pictures.masks(images, truth, predicted, ("sky", "road", "car"), "t", Path("p"), ["a", "b"])
    assert drawn[0].axes[0].get_ylabel() == "a"
    assert legend(drawn[0]) == (["no class", "sky", "road"] if void else ["sky", "road", "car"])


@pytest.mark.parametrize("number", [1, 20, 21, 150])
def test_classes_have_colours_of_their_own(number: int) -> None:
    palette = pictures._palette(number)
    assert palette.shape == (number, 3)
    assert len({to_hex(colour) for colour in palette}) == number
    if 1 < number <= 20:
        apart = np.abs(palette[:, None] - palette[None]).sum(2) + 9 * np.eye(number)
        assert apart.min() > 0.25
        assert np.abs(palette - 1).sum(1).min() > 0.25, "white is for no class"


@pytest.mark.parametrize(("bounds", "panels"), [((0.1, 0.1), 1), ((0.1, 0.2), 2)])
def test_a_fixed_clipping_bound_has_no_panel(
    drawn: list[Figure], bounds: tuple[float, float], panels: int
) -> None:
    rounds = [
        {"clipping bound": bound, "fraction clipped": 0.1 + bound * k} for k, bound in enumerate(bounds)
    ]
    plots.privacy_curves([{"round": k, "privacy": line} for k, line in enumerate(rounds)], "t", Path("p"))
    assert len(drawn[0].axes) == panels
    assert drawn[0].axes[-1].get_ylabel() == "fraction of updates clipped"


def test_rounds_have_whole_ticks(drawn: list[Figure]) -> None:
    """An axis of 20 rounds had ticks at 2.5 and 7.5."""
    lines = [{"round": k, "privacy": {"fraction clipped": k / 20}, "val": {"loss": 1.0}} for k in range(20)]
    plots.privacy_curves(lines, "t", Path("p"))
    plots.training_curve(lines, "round", [], "t", Path("p"))
    for figure in drawn:
        ticks = figure.axes[0].get_xticks()
        assert (ticks == ticks.round()).all()


def test_a_release_with_the_bound_alone_has_its_panel(drawn: list[Figure]) -> None:
    plots.privacy_curves([{"round": 0, "privacy": {"clipping bound": 0.1}}], "t", Path("p"))
    assert [axes.get_ylabel() for axes in drawn[0].axes] == ["clipping bound (L2)"]
