"""Who reports in a round, after how many steps, and when: as the documentation says, by plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.data.sampling import BatchConfig
from pfl_ext.devices.config import DevicesConfig
from pfl_ext.devices.fleet import Fleet, Traffic
from pfl_ext.devices.traces import Availability, read_capacities, sha256_of
from pfl_ext.devices.turnout import Turnout, Turnouts
from pfl_ext.randomness import stream
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore

SIZES = (3, 9, 1, 14, 6, 8, 2, 0, 11, 5)
CLASSES = {
    "fast": {"share": 0.7, "ms_per_sample": 10, "kbps_up": 1000, "kbps_down": 4000},
    "slow": {"share": 0.3, "ms_per_sample": 50, "kbps_up": 500, "kbps_down": 1000},
}
SENT = Traffic(down=25_000, up=12_500)


def data(**sampling: Any) -> FederatedImageDataset:
    batches = {"batch_size": 4, "num_epochs": 3, "straddle": False, **sampling}
    return FederatedImageDataset(NumberedStore(SIZES), local_sampling(**batches), seed=3)


def turnouts(config: DevicesConfig, cohort_size: int = 6, **sampling: Any) -> Turnouts:
    users = data(**sampling)
    ids = users.partition.user_ids
    return Turnouts(config, users, ids, cohort_size=cohort_size, seed=3, sent=SENT)


def seconds_of(user: int, images: int, speeds: Any) -> float:
    ms, up, down = speeds[user]
    return float(3 * images * ms / 1000 + 200 / down + 100 / up)


def test_seconds_are_those_of_fedscales_formula(tmp_path: Path) -> None:
    path = tmp_path / "capacities.csv"
    path.write_text("client,ms_per_sample,kbps_up,kbps_down\nb,20,100,400\na,10,50,50\n")
    fleet = Fleet(DevicesConfig(capacities=str(path)), ["a", "b"], seed=0)
    found = fleet.seconds(np.array([0, 1]), np.array([32 * 5, 32 * 5]), Traffic(25_000, 25_000))
    assert found == pytest.approx([3 * 32 * 5 * 10 / 1000 + (200 + 200) / 50, 9.6 + 0.5 + 2.0])


@pytest.mark.parametrize("late", ["drop", "partial"])
def test_a_deadline_that_nobody_meets_is_refused_and_one_that_somebody_meets_is_not(late: Any) -> None:
    """The fastest user needs 0.42 s for all of its steps, and 0.24 s for one of them."""
    for deadline, fits in ((0.05, False), (0.5, True)):
        devices = turnouts(DevicesConfig(classes=CLASSES, deadline_s=deadline, late=late))
        if fits:
            devices.check_deadline()
            continue
        with pytest.raises(
            ValueError, match=r"^devices.deadline_s is 0\.05, but the fastest user needs 0\.\d+ s"
        ):
            devices.check_deadline()


def test_classes_have_their_shares_and_speeds_spread_as_asked() -> None:
    names = [f"u{n}" for n in range(4000)]
    speeds = Fleet(DevicesConfig(classes=CLASSES), names, seed=1).speeds
    assert speeds is not None
    assert (speeds[:, 0] == 50).sum() == 1200
    assert set(map(tuple, speeds.tolist())) == {(10, 1000, 4000), (50, 500, 1000)}
    spread = Fleet(DevicesConfig(classes=CLASSES, sigma=0.6), names, seed=1).speeds
    assert spread is not None
    logs = np.log(spread / speeds)
    assert logs.std(0) == pytest.approx([0.6] * 3, rel=0.05)
    assert abs(logs.mean(0)).max() < 4 * 0.6 / np.sqrt(4000)
    assert abs(np.corrcoef(logs.T)[0, 1]) < 0.07, "a slow processor may have a fast network"


@pytest.mark.parametrize("straddle", [False, True])
@pytest.mark.parametrize("more", [{}, {"max_images": 7}, {"virtual_size": 5}])
def test_the_images_of_the_first_steps_are_those_of_the_batches(straddle: bool, more: Any) -> None:
    batches = BatchConfig(batch_size=4, num_epochs=3, straddle=straddle, **more)
    for n in range(13):
        size = np.array([n])
        epochs = batches.epochs(int(batches.taking_part(size)[0]), np.random.default_rng(0))
        sizes = [len(batch) for epoch in epochs for batch in epoch]
        assert batches.num_steps(size) == len(sizes)
        for steps in range(len(sizes) + 1):
            assert batches.images_of_steps(size, np.array([steps])) == sum(sizes[:steps])
        if not straddle:
            assert [int(batches.steps_of_epochs(size, np.array([e]))[0]) for e in range(4)] == [
                sum(map(len, epochs[:e])) for e in range(4)
            ]


@pytest.mark.parametrize("most", [0, 1, 3, 5, 99])
def test_a_user_with_less_time_makes_the_first_of_its_steps(most: int) -> None:
    users = data(flip="horizontal", input_size=6)
    whole = users.user_dataset(1)
    expected = [batch for _ in range(3) for batch in whole.iter(4)][:most]
    fixed: Any = turnouts(DevicesConfig())
    fixed.of = lambda number: Turnout(np.array([1]), np.array([most]), 1, 0, 0, 0.0, 1.0)
    users.turnouts = fixed
    (member,) = users.members(99)
    part = users.read(member)
    found = [batch for _ in range(3) for batch in part.iter(4)]
    assert len(found) == len(expected) == min(most, 9)
    for ours, theirs in zip(found, expected):
        assert all((a == b).all() for a, b in zip(ours, theirs))
    assert (member.num_images, member.num_steps) == (9, most)
    if most <= 9:
        assert member.num_passes == sum(len(batch[0]) for batch in found)


def expected(config: DevicesConfig, number: int, start: float, cohort_size: int = 6) -> tuple[Any, ...]:
    """A round by the rules of `pfl_ext.devices.turnout`, user by user, without traces and stragglers."""
    users = data()
    speeds = Fleet(config, users.partition.user_ids, 3).speeds
    asked = int(np.ceil(config.over_selection * cohort_size - 1e-9))
    coins = stream(3, "drop-outs", number).random(len(SIZES))
    reported, lost, late, all_seconds = [], 0, 0, []
    for place, user in enumerate(users.draw_cohort(asked, number).tolist()):
        n = SIZES[user]
        batches = [min(4, n - first) for first in range(0, n, 4)] * 3
        times = [seconds_of(user, sum(batches[:s]), speeds) for s in range(len(batches) + 1)]
        all_seconds.append(times[-1])
        fits = [s for s, t in enumerate(times) if config.deadline_s is None or t <= config.deadline_s]
        if coins[user] < config.drop_out:
            lost += 1
        elif not fits or (config.late == "drop" and fits[-1] < len(batches)) or (fits == [0] and n):
            late += 1
        else:
            reported.append((times[fits[-1]], place, user, fits[-1]))
    wanted = cohort_size if config.over_selection > 1 else asked
    kept = sorted(reported)[:wanted]
    late += len(reported) - len(kept)
    length = max((t for t, *_ in kept), default=max(all_seconds))
    if len(kept) < wanted and config.deadline_s is not None:
        length = config.deadline_s
    kept.sort(key=lambda each: each[1])
    return [k[2] for k in kept], [k[3] for k in kept], asked, lost, late, start, start + length


CONFIGS = {
    "wait": DevicesConfig(classes=CLASSES),
    "drop-outs": DevicesConfig(classes=CLASSES, drop_out=0.4),
    "drop": DevicesConfig(classes=CLASSES, deadline_s=1.0, late="drop"),
    "partial": DevicesConfig(classes=CLASSES, deadline_s=1.0, late="partial", sigma=0.5),
    "partial and drop-outs": DevicesConfig(classes=CLASSES, deadline_s=0.8, late="partial", drop_out=0.3),
    "first": DevicesConfig(classes=CLASSES, over_selection=1.5, drop_out=0.1, sigma=0.3),
    "first in time": DevicesConfig(classes=CLASSES, over_selection=1.3, deadline_s=1.0, late="drop"),
    "nobody": DevicesConfig(classes=CLASSES, deadline_s=0.1, late="partial"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rounds_are_as_the_rules_say(name: str) -> None:
    config, time, seen = CONFIGS[name], 0.0, []
    rounds = turnouts(config)
    for number in range(12):
        turnout = rounds.of(number)
        found = [turnout.users.tolist(), turnout.steps.tolist(), turnout.selected]
        found += [turnout.lost, turnout.late, turnout.start, turnout.end]
        assert found == list(expected(config, number, time)), number
        time = turnout.end
        seen.append(len(turnout.users))
        assert turnout.selected == len(turnout.users) + turnout.lost + turnout.late
    assert (max(seen) == 0) == (name == "nobody")
    assert (min(seen) == 6) == (name in ("wait", "first"))
    again = turnouts(config)
    assert again.of(11).end == time, "a resumed run asks for the last round first"
    assert again.of(3).users.tolist() == rounds.of(3).users.tolist()
    line = rounds.line(11)
    assert line["virtual_seconds"] == round(time, 4)
    reported = len(again.of(11).users)
    assert (line["bytes_down"], line["bytes_up"]) == (25_000 * line["selected"], 12_500 * reported)


def test_a_share_of_each_cohort_has_time_for_a_part_of_the_epochs() -> None:
    partial = turnouts(DevicesConfig(stragglers=0.5, late="partial"), num_epochs=5)
    drop = turnouts(DevicesConfig(stragglers=0.5, late="drop"), num_epochs=5)
    seen = set()
    for number in range(60):
        took, dropped = partial.of(number), drop.of(number)
        n = np.array(SIZES)[took.users]
        epochs = took.steps[n > 0] // -(-n[n > 0] // 4)
        assert (took.steps[n > 0] == epochs * -(-n[n > 0] // 4)).all()
        stragglers = took.users[n > 0][epochs < 5]
        assert len(took.users) == 6
        assert 2 <= len(stragglers) <= 3
        assert dropped.late == 3
        assert not set(dropped.users.tolist()) & set(stragglers.tolist()), "the same for all algorithms"
        seen |= set(epochs.tolist())
    assert seen == {1, 2, 3, 4, 5}
    assert "virtual_seconds" not in partial.line(0), "no speeds, no clock"


def test_a_drop_out_has_its_probability_and_depends_on_no_data() -> None:
    config = DevicesConfig(drop_out=0.3)
    rounds = turnouts(config)
    lost = [rounds.of(number).lost for number in range(1000)]
    assert abs(np.mean(lost) / 6 - 0.3) < 4 * np.sqrt(0.21 / 6000)
    store = NumberedStore([1] * len(SIZES))
    other = FederatedImageDataset(store, local_sampling(batch_size=4), seed=3)
    alike = Turnouts(config, other, other.partition.user_ids, cohort_size=6, seed=3, sent=SENT)
    for number in range(50):
        assert alike.of(number).users.tolist() == rounds.of(number).users.tolist()


TRACE = "client,on,off\nphone,10,20\nphone,30,60\ntablet,0,5\ntablet,5.5,5.5\ntablet,90,100\n"


def test_a_device_is_on_by_the_rule_also_after_a_jump(tmp_path: Path) -> None:
    path = tmp_path / "on.csv"
    path.write_text(TRACE)
    found = Availability(path, 100.0, ["tablet", "phone"], seed=0)
    times: dict[int, list[tuple[float, float]]] = {
        1: [(10, 20), (30, 60)],
        0: [(0, 5), (5.5, 5.5), (90, 100)],
    }
    for t in (0, 4.9, 5, 5.2, 5.5, 9.9, 10, 20, 20.1, 30, 60, 61, 90, 99.9, 100, 105, 110, 235.5, 1e6 + 30):
        for user in (0, 1):
            right = any(on <= t % 100 <= off for on, off in times[user])
            assert found.on(np.array([user]), t).tolist() == [right], (t, user)
    assert found.on(np.array([1, 0]), np.array([15.0, 15.0])).tolist() == [True, False]
    assert found.next_on(70.0) == 90.0
    assert found.next_on(265.0) == 290.0
    assert found.next_on(390.0) == 390.0


def test_the_next_time_of_a_device_is_one_at_which_it_is_on(tmp_path: Path) -> None:
    """In decimal fractions, whose sums and remainders are rounded; the second device is on for no time."""
    path, rng = tmp_path / "on.csv", np.random.default_rng(0)
    for device in ("0.1,60.1", "7.3,7.3", "3540.7,3600", "0,0.3"):
        path.write_text(f"client,on,off\nu,{device}\n")
        found, users = Availability(path, 3600.0, ["u"], seed=0), np.array([0])
        for start in (200.0, *rng.uniform(0, 1e7, 300).round(2)):
            begins = found.next_on(start)
            assert found.on(users, begins).all(), (device, start)
            assert not found.on(users, begins - 1e-3).any() or start >= begins - 1e-3
            assert begins >= start
    path.write_text("client,on,off\nu,3540.7,3600\n")
    assert Availability(path, 3600.0, ["u"], seed=0).on(users, np.nextafter(3600.0, 0)).all()


def test_cohorts_are_of_devices_that_are_on_at_their_start_and_end(tmp_path: Path) -> None:
    path = tmp_path / "on.csv"
    on: dict[int, tuple[float, float]] = {user: (10.0 * user, 10.0 * user + 25) for user in range(len(SIZES))}
    rows = [f"user-{user},{a},{b}" for user, (a, b) in on.items()]
    path.write_text("\n".join(["client,on,off", *rows]) + "\n")
    users = data()
    store_ids = list(users.partition.user_ids)
    path.write_text(path.read_text().replace("user-", store_ids[0][:-1]))
    config = DevicesConfig(classes=CLASSES, availability=str(path), availability_period_s=300)
    rounds = turnouts(config, cohort_size=2)
    speeds = Fleet(config, store_ids, 3).speeds
    lost = waited = 0
    assert speeds is not None
    for number in range(600):
        turnout = rounds.of(number)
        start = turnout.start % 300
        able = [u for u in on if on[u][0] <= start <= on[u][1]]
        assert turnout.selected == min(2, len(able)) > 0
        assert set(turnout.users.tolist()) <= set(able)
        for user in turnout.users.tolist():
            images = 3 * SIZES[user]
            assert on[user][0] <= (start + seconds_of(user, images, speeds)) % 300 <= on[user][1]
        waited += start == 0 and turnout.start > 0
        lost += turnout.lost
    assert lost > 0
    assert waited > 0, "from 115 to 300 nobody is on"


def test_devices_of_other_names_are_given_to_users_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "capacities.csv"
    rows = [f"{n},{n + 1},100,100" for n in range(3)]
    path.write_text("\n".join(["client,ms_per_sample,kbps_up,kbps_down", *rows]))
    found = read_capacities(path, [f"user-{n}" for n in range(7)], seed=4)
    assert sorted(np.unique(found[:, 0], return_counts=True)[1].tolist()) == [2, 2, 3]
    others = {tuple(read_capacities(path, [f"u{n}" for n in range(7)], seed)[:, 0]) for seed in range(9)}
    assert len(others) > 1


CAPACITIES = "client,ms_per_sample,kbps_up,kbps_down\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "must be client,ms"),
        ("client,ms,up,down\n", "must be client,ms"),
        (CAPACITIES + "a,1,2\n", "line 2: give client"),
        (CAPACITIES + "a,1,2,x\n", "line 2: give client"),
        (CAPACITIES + "a,1,2,nan\n", "line 2: give client"),
        (CAPACITIES + "a,1,2,0\n", "line 2: give positive numbers"),
        (CAPACITIES + "a,1,2,3\na,1,2,3\n", "line 3: client a comes twice"),
        (CAPACITIES, "has 0 of 2 users"),
        (CAPACITIES + "a,1,2,3\nc,1,2,3\n", "has 1 of 2 users"),
        ("\xff", "is no CSV file"),
    ],
)
def test_a_wrong_file_of_speeds_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as fault:
        read_capacities(path, ["a", "b"], 0)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("row", ["a,5,4", "a,-1,4", "a,5,101", "a,5,9\na,8,12"])
def test_times_out_of_order_are_refused(tmp_path: Path, row: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"client,on,off\n{row}\n")
    with pytest.raises(ValueError, match="in order, must not overlap, and must end by"):
        Availability(path, 100.0, ["a"], 0)


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with pytest.raises(ValueError, match="no such file"):
        sha256_of("devices.capacities", path, None)
    path.write_text(CAPACITIES)
    known = sha256_of("devices.capacities", path, None)
    assert sha256_of("devices.capacities", path, known) == known
    path.write_text(CAPACITIES + "a,1,1,1\n")
    with pytest.raises(ValueError, match="has changed"):
        sha256_of("devices.capacities", path, known)


ONE = {"share": 1, "ms_per_sample": 1, "kbps_up": 1, "kbps_down": 1}


@pytest.mark.parametrize(
    "values, message",
    [
        ({"classes": {"a": {"share": 1}}}, "devices.classes.a needs exactly the keys share"),
        ({"classes": {"a": {**ONE, "kbps_up": 0}}}, "kbps_up is 0: give a positive number"),
        ({"classes": {"a": {**ONE, "kbps_up": "x"}}}, "kbps_up is 'x': give a positive number"),
        ({"classes": {"a": {**ONE, "share": 0.5}}}, "add up to 0.5"),
        ({"classes": {"a": ONE}, "capacities": "f"}, "leave one of them out"),
        ({"sigma": 0.5}, "which are not set: set devices.classes"),
        ({"deadline_s": 5.0, "late": "drop"}, "deadline_s needs speeds"),
        ({"classes": {"a": ONE}, "deadline_s": 5.0}, "no effect where devices.late is wait"),
        ({"stragglers": 0.5}, "no effect where devices.late is wait"),
        ({"late": "drop"}, "without a deadline no user is late"),
        ({"over_selection": 1.3}, "over_selection needs speeds"),
        ({"classes": {"a": ONE}, "availability": "f"}, "must be set together"),
        ({"availability_period_s": 5.0}, "must be set together"),
        ({"capacities_sha256": "f"}, "is the checksum of a file that is not set"),
    ],
)
def test_what_has_no_meaning_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, ValidationError), match=message):
        DevicesConfig(**values)


def test_more_users_than_there_are_cannot_be_asked() -> None:
    config = DevicesConfig(classes=CLASSES, over_selection=2.0)
    with pytest.raises(ValueError, match=r"draws 12 users, but there are only 10: set it to at most"):
        turnouts(config)
