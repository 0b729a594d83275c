"""What a preprocessing that was stopped goes on by: the key of each part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dataset.convert.source import Found, Part, Rows, assembled
from dataset.convert.splits import Dealing
from dataset.convert.text import Names


def part(key: str, images: Sequence[str], label: str = "cat") -> Part:
    rows = Rows({"labels": "class"}, {"labels": Names(None)})
    for image in images:
        rows.add("here", "user", image, "train", [label])
    return Part("file", key, rows.table(), lambda row: "here", lambda start: iter(()))


def keys(*parts: Part, seed: int = 0, test: float = 0.0) -> Sequence[str]:
    found = Found(parts, {"labels": "class"}, {}, 0)
    return assembled(found, Dealing(False, "images", {"val": 0.0, "test": test}, seed), {}).parts


FIRST = part("a", ["1", "2", "3"])


@pytest.mark.parametrize(
    "others",
    [
        keys(part("b", ["1", "2", "3"]), part("a", ["4"])),
        keys(part("a", ["1", "2", "3"], "dog"), part("a", ["4"])),
        keys(FIRST, part("a", ["5"])),
        keys(FIRST, part("a", ["4"]), seed=3, test=0.6),
    ],
    ids=["bytes", "label", "another part", "splits"],
)
def test_a_part_of_another_source_has_another_key(others: Sequence[str]) -> None:
    """Whatever is another: a file's size or time, a record of any part, where a part begins, its splits."""
    ours = keys(FIRST, part("a", ["4"]))
    assert ours == keys(FIRST, part("a", ["4"]))
    assert ours[0] != ours[1], "where it begins counts"
    assert ours[0] != others[0]
