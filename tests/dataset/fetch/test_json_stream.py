"""JSON is read part by part as the standard library reads it, wherever the blocks of the file begin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataset.fetch import json_stream

CONTENT = {"count": -12.5e-3, "all": 1e22, "user_data": {"a": 70, "b": 0.25, "c": "1e5"}, "last": -7}


@pytest.mark.parametrize("space", ["", " ", "\n \t"])
def test_a_number_may_lie_across_blocks(space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its characters is the last of some block: digits, the point, the e and its sign."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(CONTENT, separators=(f",{space}", f":{space}")).replace("e+", "E+") + space)
    within = [("user_data", name, value) for name, value in CONTENT["user_data"].items()]  # type: ignore[attr-defined]
    expected = [(None, "count", -0.0125), (None, "all", 1e22), *within, (None, "last", -7)]
    for block in range(1, path.stat().st_size + 1):
        monkeypatch.setattr(json_stream, "_BLOCK", block)
        assert list(json_stream.members(path, "user_data", "LEAF")) == expected
