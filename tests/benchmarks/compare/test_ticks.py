"""Numbers along the axes of a comparison's charts."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.compare.charts import Chart, draw
from benchmarks.compare.series import Line
from benchmarks.reporting.plots import BLACK, COLOURS, GREY


@pytest.mark.parametrize(("end", "log"), [(5.0, False), (4e4, False), (1e5, True)])
def test_large_numbers_have_commas(end: float, log: bool) -> None:
    x, y = np.array([1.0, end]), np.array([10.0, 20.0])
    figure = Figure()
    axes = figure.subplots()
    draw(axes, Chart("t", "MB", "score", [Line(0, x, y, y, y, 1)], log), None, (BLACK, GREY, *COLOURS))
    figure.draw_without_rendering()
    texts = [label.get_text() for label in axes.get_xticklabels()]
    assert any("," in text for text in texts) == (end > 1000), texts
