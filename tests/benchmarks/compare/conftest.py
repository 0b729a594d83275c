from __future__ import annotations

import pytest


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture is written beside the page, which has charts of its own."""
    monkeypatch.setattr("benchmarks.compare.charts.png", lambda *_: None)
    monkeypatch.setattr("benchmarks.compare.charts.single", lambda *_: ())
