"""Division by place: against hand-made cells, and against s2cell's own ancestors."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import s2cell
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.partitions.geo import ancestors, geo_partition, leaf_ids, read_coordinates

FACE = "1"  # the cube's face around (0, 0); its four children have these tokens
CHILDREN = ("04", "0c", "14", "1c")


def within(token: str, count: int, seed: int = 0) -> list[int]:
    """Leaves below a cell: its id plus even numbers within its range."""
    cell = s2cell.token_to_cell_id(token)
    reach = (cell & -cell) - 1
    rng = np.random.default_rng(seed)
    return [cell + 2 * int(step) for step in rng.integers(-reach // 2 + 1, reach // 2, count)]


def test_tokens_are_known_places() -> None:
    """The face around (0, 0) is cell 1; the leaf at (0, 0) is that of S2's own documentation."""
    assert s2cell.cell_id_to_token(int(ancestors(leaf_ids([0.0], [0.0]), 0)[0])) == FACE
    assert s2cell.cell_id_to_token(int(leaf_ids([0.0], [0.0])[0])) == "1000000000000001"
    faces = ancestors(leaf_ids([0, 0, 90, 0, 0, -90], [0, 90, 0, 180, -90, 0]), 0)
    assert [s2cell.cell_id_to_token(int(face)) for face in faces] == ["1", "3", "5", "7", "9", "b"]


@settings(max_examples=60)
@given(latitude=st.floats(-90, 90), longitude=st.floats(-180, 180), level=st.integers(0, 30))
def test_ancestors_are_those_of_s2cell(latitude: float, longitude: float, level: int) -> None:
    leaf = leaf_ids([latitude], [longitude])
    assert int(ancestors(leaf, level)[0]) == s2cell.cell_id_to_parent_cell_id(int(leaf[0]), level)


def test_places_are_on_the_earth_up_to_its_poles_and_its_date_line(tmp_path: Path) -> None:
    places = [(90.0, 180.0), (-90.0, -180.0)]
    beyond = [(90.01, 0.0), (-90.01, 0.0), (0.0, 180.01), (0.0, -180.01), (float("nan"), 0.0)]
    path = tmp_path / "places.csv"

    def listed(*places: tuple[float, float]) -> dict[str, tuple[float, float]]:
        lines = [f"{number},{latitude},{longitude}" for number, (latitude, longitude) in enumerate(places)]
        path.write_text("\n".join(["image_id,latitude,longitude", *lines]))
        return read_coordinates(path)

    assert list(listed(*places).values()) == places
    assert len(leaf_ids(*zip(*places))) == 2
    for place in beyond:
        with pytest.raises(ValueError, match="is not a place on the earth"):
            listed(place)


def test_a_cell_is_divided_only_while_it_holds_too_many() -> None:
    """In a face of 10 + 3 + 2 + 0 images at N_max = 5, the first child is divided once more: 5, 4, 1."""
    grandchildren = [s2cell.cell_id_to_token(_child(CHILDREN[0], number)) for number in range(4)]
    leaves = within(grandchildren[0], 5) + within(grandchildren[1], 4) + within(grandchildren[3], 1)
    leaves += within(CHILDREN[1], 3) + within(CHILDREN[2], 2)
    leaves += within("3", 5)  # another face, just full
    order = np.random.default_rng(1).permutation(len(leaves))
    found = geo_partition(np.array(leaves, np.uint64)[order], 5)
    expected = [grandchildren[0]] * 5 + [grandchildren[1]] * 4 + [grandchildren[3]]
    expected += [CHILDREN[1]] * 3 + [CHILDREN[2]] * 2 + ["3"] * 5
    assert found == [expected[i] for i in order]


def test_small_cells_are_dropped_and_those_of_just_the_least_number_are_not() -> None:
    """At N_max = 200, N_min is 2."""
    leaves = (
        within(CHILDREN[0], 150) + within(CHILDREN[1], 100) + within(CHILDREN[2], 2) + within(CHILDREN[3], 1)
    )
    found = Counter(geo_partition(np.array(leaves, np.uint64), 200))
    assert found == {CHILDREN[0]: 150, CHILDREN[1]: 100, CHILDREN[2]: 2, "NA": 1}


def test_images_at_one_place_cannot_be_divided() -> None:
    leaf = leaf_ids([48.8584] * 7, [2.2945] * 7)
    assert geo_partition(leaf, 3) == [s2cell.cell_id_to_token(int(leaf[0]))] * 7


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), most=st.integers(1, 60))
def test_every_image_lies_in_its_cell_and_no_cell_could_have_stayed_whole(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    leaves = leaf_ids(rng.normal(40, 8, 200).clip(-90, 90).tolist(), rng.normal(0, 30, 200).tolist())
    cells = geo_partition(leaves, most, min_share=0.0)
    for leaf, token in zip(leaves, cells):
        level = s2cell.token_to_level(token)
        assert s2cell.cell_id_to_token(int(ancestors(leaf[None], level)[0])) == token
        if level:
            parent = ancestors(leaf[None], level - 1)[0]
            assert (ancestors(leaves, level - 1) == parent).sum() > most
    assert max(Counter(cells).values()) <= most


def test_what_is_no_place_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a number of at least 1"):
        geo_partition(np.zeros(0, np.uint64), 0)
    path = tmp_path / "c.csv"
    for text, said in [
        ("image_id,lat\n", "has no column 'latitude'"),
        ("image_id,latitude,longitude\na,1,2\nb,north,2\n", "line 3 has no latitude and longitude"),
        ("image_id,latitude,longitude\na,1\n", "line 2 has 2 cells, not 3"),
        ("image_id,latitude,longitude\na,1,\n", "line 2 has no latitude and longitude"),
        (
            "image_id,latitude,longitude\na,1,nan\n",
            "line 2: latitude 1.0, longitude nan is not a place on the earth",
        ),
        ("image_id,latitude,longitude\na,1,2\na,1,2\n", "line 3 has image a a second time"),
        ('image_id,latitude,longitude\n"a\n', "is not valid CSV"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(said)):
            read_coordinates(path)
    path.write_text("latitude,image_id,longitude\n-33.9,a.jpg,18.4\n")
    assert read_coordinates(path) == {"a.jpg": (-33.9, 18.4)}
    path.write_text("image_id,latitude,longitude\na,1,2\n\nb,3,4\n\n")
    assert read_coordinates(path) == {"a": (1, 2), "b": (3, 4)}, "an empty line is no row"


def _child(token: str, number: int) -> int:
    """Child 0..3 of a cell, in S2's order along its curve."""
    cell = s2cell.token_to_cell_id(token)
    last = cell & -cell
    return int(cell - last + (2 * number + 1) * (last >> 2))
