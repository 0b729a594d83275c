from __future__ import annotations

import pytest

from benchmarks.compare import charts
from dataset.pages import tag


@pytest.fixture
def page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture is written beside the page, which has charts of its own."""
    monkeypatch.setattr(charts, "png", lambda *_: None)
    monkeypatch.setattr(charts, "single", lambda *_: ())


@pytest.fixture
def no_pictures(page_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chart is drawn: the page has their titles, and what they say in words."""
    monkeypatch.setattr(
        charts, "svg", lambda chart, labels: tag("figure", tag("figcaption", chart.title), chart.alt(labels))
    )


@pytest.fixture
def one_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first chart is drawn: all have the same names beside them."""
    real = charts.charts
    monkeypatch.setattr(charts, "charts", lambda comparison: real(comparison)[:1])
