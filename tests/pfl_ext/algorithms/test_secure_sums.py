"""The protocols of secure sums: what they add up, what the colluding see, what is sent, and what is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pfl_ext.algorithms import secure_aggregation, turbo_aggregate
from pfl_ext.algorithms.finite_field import KEY_BYTES, PRIME, Elements, combine, lagrange, uniform
from pfl_ext.algorithms.secure_aggregation import agreed, pairwise_sum, public_of
from pfl_ext.algorithms.secure_sum import SecureSum, SumLost
from pfl_ext.algorithms.turbo_aggregate import circle_sum, points_of, spread
from tests.pfl_ext.algorithms.test_finite_field import unevenness

SIZE = 30
Vectors = dict[int, Elements]


def vectors(users: int, size: int = SIZE) -> Vectors:
    rng = np.random.default_rng(users)
    return {place: rng.integers(0, PRIME, size) for place in range(users)}


def exact(found: Mapping[int, Elements]) -> list[int]:
    """By Python's integers."""
    return [sum(int(v[i]) for v in found.values()) % PRIME for i in range(len(next(iter(found.values()))))]


def without(found: Vectors, lost: tuple[int, ...]) -> Vectors:
    return {place: vector for place, vector in found.items() if place not in lost}


class Post:
    """Keeps every message."""

    def __init__(self) -> None:
        self.sent: list[tuple[int | None, int | None, str, Any]] = []

    def __call__(self, sender: int | None, receiver: int | None, what: str, content: Any) -> None:
        content = np.stack(content) if isinstance(content, tuple) else content
        self.sent.append((sender, receiver, what, content))

    def all(self, kind: str) -> list[tuple[int | None, int | None, Any]]:
        return [(sender, receiver, content) for sender, receiver, what, content in self.sent if what == kind]

    def traffic(self) -> tuple[Counter[int | None], Counter[int | None]]:
        """Bytes that each got and sent; an element has 4."""
        down, up = Counter[int | None](), Counter[int | None]()
        for sender, receiver, _, content in self.sent:
            size = len(content) if isinstance(content, bytes) else 4 * content.size
            up[sender] += size
            down[receiver] += size
        return down, up


@pytest.mark.parametrize("lost", [(), (0,), (1, 4), (0, 2, 5)])
def test_pairwise_masks_leave_the_sum_of_those_who_are_left(lost: tuple[int, ...]) -> None:
    left = without(vectors(6), lost)
    assert pairwise_sum(left, 6, 2).tolist() == exact(left)


def test_pairwise_masks_need_one_user_more_than_collude() -> None:
    left = without(vectors(6), (0, 2, 5))
    with pytest.raises(SumLost, match=r"^3 of 6 users are left, and 4 shares are needed$"):
        pairwise_sum(left, 6, 3)


def test_a_wrong_mask_or_share_spoils_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    left, real = without(vectors(5), (3,)), secure_aggregation.pair_mask

    def wrong(own: bytes, user: int, other: int, public: bytes, size: int) -> Elements:
        mask = real(own, user, other, public, size)
        return (mask + ((user, other) == (1, 2))) % PRIME

    with monkeypatch.context() as patched:
        patched.setattr(secure_aggregation, "pair_mask", wrong)
        assert pairwise_sum(left, 5, 2).tolist() != exact(left)
    take = secure_aggregation.User.take

    def spoilt(self: Any, other: int, public: bytes, message: bytes) -> None:
        take(self, other, public, message)
        if (self.place, other) == (1, 3):
            self.held[3] = self.held[3][0] ^ 1, self.held[3][1]

    with monkeypatch.context() as patched:
        patched.setattr(secure_aggregation.User, "take", spoilt)
        with pytest.raises(SumLost, match=r"^the shares of user 3 give no key of that user$"):
            pairwise_sum(left, 5, 2)


def test_a_share_is_read_by_its_receiver_alone() -> None:
    users = [secure_aggregation.User(place) for place in range(3)]
    public = [user.public for user in users]
    message = users[0].shares(public, 1)[1]
    users[1].take(0, public[0][1], message)
    with pytest.raises(Exception):  # noqa: B017, PT011 - cryptography's InvalidTag
        users[2].take(0, public[0][1], message)
    with pytest.raises(Exception):  # noqa: B017, PT011
        users[1].take(0, public[0][1], bytes([message[0] ^ 1]) + message[1:])


@pytest.mark.parametrize(("share", "users", "number"), [(0.29, 100, 29), (0.7, 90, 63), (0.5, 5, 2)])
def test_a_share_is_rounded_down_as_written(share: float, users: int, number: int) -> None:
    options = SimpleNamespace(drop_out=share)
    ours: Any = SimpleNamespace(context=SimpleNamespace(seed=1, options=options))
    assert len(SecureSum.drawn(ours, np.arange(users), 0)) == number


@pytest.mark.parametrize("secret", [0, PRIME // 2])
def test_the_server_and_t_users_see_uniform_vectors_whose_sum_alone_is_that_of_the_secrets(
    secret: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the colluding know is taken away: masks with them, and the seeds that the server has found."""
    users, degree, size, post = 6, 2, 20_000, Post()
    parties: list[secure_aggregation.User] = []
    begin = secure_aggregation.User.__init__

    def kept(self: secure_aggregation.User, place: int) -> None:
        begin(self, place)
        parties.append(self)

    monkeypatch.setattr(secure_aggregation.User, "__init__", kept)
    own = {place: np.full(size, secret + place, np.int64) for place in range(users) if place != 4}
    pairwise_sum(own, users, degree, post)
    colluding, honest = (0, 5), (1, 2, 3)
    rest = []
    for sender, _, y in post.all("masked update"):
        if sender in honest:
            assert sender is not None
            y = y - uniform(parties[sender].seed, size)
            for other in (*colluding, 4):  # found of the one who was lost
                mask = uniform(
                    agreed(parties[other].mask_key, public_of(parties[sender].mask_key), "mask"), size
                )
                y = y - mask if sender < other else y + mask
            rest.append(y % PRIME)
    for vector in rest:
        assert unevenness(vector) < 1
    for one, other in combinations(rest, 2):
        assert unevenness((one + other) % PRIME) < 1
    assert (sum(rest) % PRIME == sum(own[place] for place in honest) % PRIME).all()
    for _, _, content in post.all("masked update"):
        assert unevenness(content) < 1


def test_no_user_answers_with_both_secrets_of_one() -> None:
    post = Post()
    pairwise_sum(without(vectors(4), (2,)), 4, 1, post)
    assert [content.size for _, _, content in post.all("answer")] == [4 * 9] * 3, "a share of each user"
    keys = [content for sender, _, content in post.all("keys") if sender is not None]
    assert len(set(keys)) == 4


def groups_of(*sizes: int) -> list[list[int]]:
    places = np.random.default_rng(3).permutation(sum(sizes))
    return [part.tolist() for part in np.split(places, np.cumsum(sizes)[:-1])]


@pytest.mark.parametrize("sizes", [(4,), (3, 3), (4, 3, 5), (2, 2, 2, 3)])
def test_a_circle_of_groups_leaves_the_sum_with_half_of_each_group_lost(sizes: tuple[int, ...]) -> None:
    groups = groups_of(*sizes)
    whole = vectors(sum(sizes))
    assert circle_sum(whole, groups).tolist() == exact(whole)
    for first in (0, 1):
        lost = tuple(place for group in groups for place in group[first : first + len(group) // 2])
        left = without(whole, lost)
        assert circle_sum(left, groups).tolist() == exact(left)


def test_a_circle_is_broken_where_more_than_half_of_a_group_is_lost() -> None:
    groups = groups_of(4, 5)
    left = without(vectors(9), tuple(groups[1][:3]))
    with pytest.raises(SumLost, match=r"^of a group of 5 users 2 are left, and 3 are needed$"):
        circle_sum(left, groups)


@pytest.mark.parametrize("kind", ["mask", "part", "coded"])
def test_a_wrong_mask_or_part_spoils_the_circle(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, calls = groups_of(3, 4), [0]
    left = without(vectors(7), (groups[1][1],))

    def wrong(masked: Elements, size: int) -> Any:
        values, coded = spread(masked, size)
        calls[0] += 1
        if calls[0] == 2:
            # the part of one who is left, or the coded one, which is needed for the one who is lost
            (values if kind == "part" else coded)[0, 0] ^= 1
        return values, coded

    def other(key: bytes, size: int) -> Elements:
        calls[0] += 1
        return (uniform(key, size) + (calls[0] == 2)) % PRIME

    name = "uniform" if kind == "mask" else "spread"
    monkeypatch.setattr(turbo_aggregate, name, other if kind == "mask" else wrong)
    assert circle_sum(left, groups).tolist() != exact(left)


def rank(matrix: Elements) -> int:
    """In the field."""
    rows, found = [[int(v) for v in row] for row in matrix], 0
    for column in range(matrix.shape[1]):
        pivot = next((r for r in range(found, len(rows)) if rows[r][column]), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        scale = pow(rows[found][column], -1, PRIME)
        for r in range(found + 1, len(rows)):
            factor = rows[r][column] * scale
            rows[r] = [(a - factor * b) % PRIME for a, b in zip(rows[r], rows[found])]
        found += 1
    return found


@pytest.mark.parametrize("size", [3, 4, 5, 8, 11])
def test_what_t_users_of_a_group_get_is_any_vector_whatever_the_update(size: int) -> None:
    """The map from a user's N - 1 random vectors to the 2 T values that the colluding see is onto."""
    alpha, beta = points_of(size)
    of_parts = np.vstack([np.eye(size - 1, dtype=np.int64), np.full((1, size - 1), PRIME - 1)])
    coded = combine(lagrange(beta, alpha), of_parts)
    colluding = (size - 1) // 2
    for chosen in combinations(range(size), colluding):
        assert rank(np.vstack([of_parts[list(chosen)], coded[list(chosen)]])) == 2 * colluding


@pytest.mark.parametrize("secret", [0, PRIME // 2])
def test_the_server_and_t_users_see_uniform_parts(secret: int) -> None:
    """The masks that the server knows are taken away."""
    groups, post, size = groups_of(5, 5), Post(), 20_000
    left = {place: np.full(size, secret, np.int64) for place in range(10)}
    circle_sum(left, groups, post)
    keys = {receiver: content for _, receiver, content in post.all("mask")}
    colluding = groups[1][1:3]
    for sender in groups[0]:
        seen = [
            content for s, receiver, content in post.all("parts") if s == sender and receiver in colluding
        ]
        assert all(content.shape == (2, size) for content in seen), "nobody was before the first group"
        first, second = ((content - uniform(keys[sender], size)) % PRIME for content in seen)
        for vector in (*first, *second, first[0] + 5 * second[0], first[1] - second[1], first[0] - first[1]):
            assert unevenness(vector % PRIME) < 1
    for user, _, content in post.all("parts"):  # without the server, whatever a user of this circle gets
        if user in groups[1]:
            assert content.shape == (4, size)
            assert all(unevenness(vector) < 1 for vector in content)
    assert len(keys[0]) == KEY_BYTES
