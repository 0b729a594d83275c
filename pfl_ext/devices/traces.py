"""Speeds and active times of real devices, from CSV files.

    client,ms_per_sample,kbps_up,kbps_down      one line for each device
    client,on,off                               one line for each time that a device is on, in seconds

They hold the content of FedScale's two pickled files (`computation` and `communication`; `active`,
`inactive`); pickles are never read here. A device is on while ``on <= t mod period <= off``. The times of a
device are in order and do not overlap.

If a file names all users by their ids, these devices are theirs. If it names none of them, each user gets one
of its devices by a draw from the seed; several users share one if there are too few.

Letters: U users, C devices of a file, N times of a file.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.arrays import BoolArray, FloatArray, IntArray
from dataset.files import file_digest
from pfl_ext.randomness import stream

CAPACITIES = ("client", "ms_per_sample", "kbps_up", "kbps_down")
AVAILABILITY = ("client", "on", "off")


def sha256_of(key: str, path: Path, expected: str | None) -> str:
    """The SHA-256 of a file of ``devices``, in hexadecimal.

    Args:
        key: the config key that names the file.
        path: the file.
        expected: the SHA-256 that it must have; None: any.

    Raises:
        ValueError: one line, when the file does not exist or has another SHA-256.
    """
    if not path.is_file():
        raise ValueError(f"{key} {path}: no such file")
    found = file_digest(path)
    if expected not in (None, found):
        raise ValueError(f"{key} {path} has changed: its SHA-256 is not that of the config, {expected}")
    return found


def _rows(path: Path, header: Sequence[str]) -> Iterator[tuple[int, str, list[float]]]:
    """Line number, client and numbers of each line.

    Raises:
        ValueError: one line with the line number.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            if tuple(next(lines, ())) != tuple(header):
                raise ValueError(f"the first line of {path} must be {','.join(header)}")
            for line in lines:
                values = [math.nan] * len(header[1:])
                if len(line) == len(header):
                    values = [_number(word) for word in line[1:]]
                if not all(map(math.isfinite, values)):
                    text = f"{path}, line {lines.line_num}: give {', '.join(header)}, numbers but the first"
                    raise ValueError(text)
                yield lines.line_num, line[0], values
    except (UnicodeDecodeError, csv.Error) as fault:
        raise ValueError(f"{path} is no CSV file: {fault}") from fault


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def assigned(clients: Sequence[str], user_ids: Sequence[str], seed: int, path: Path) -> IntArray:
    """``[U]``: for each user, the index of its device among a file's clients.

    Raises:
        ValueError: when the file names some of the users but not all, or has no clients.
    """
    places = {client: place for place, client in enumerate(clients)}
    named = sum(user in places for user in user_ids)
    if not clients or 0 < named < len(user_ids):
        raise ValueError(
            f"{path} has {named:,} of {len(user_ids):,} users: list all users, or use names of devices "
            "that are not users"
        )
    if named:
        return np.array([places[user] for user in user_ids], np.int64)
    order = stream(seed, "devices of a file").permutation(len(clients))
    return order[np.arange(len(user_ids)) % len(clients)].astype(np.int64)


def read_capacities(path: Path, user_ids: Sequence[str], seed: int) -> FloatArray:
    """``[U, 3]``: for each user milliseconds of a forward pass of one image, kbit/s up and kbit/s down.

    Raises:
        ValueError: one line, when the file does not have this form.
    """
    found: dict[str, list[float]] = {}
    for line, client, values in _rows(path, CAPACITIES):
        if client in found:
            raise ValueError(f"{path}, line {line}: client {client} comes twice")
        if min(values) <= 0:
            raise ValueError(f"{path}, line {line}: give positive numbers")
        found[client] = values
    return np.array(list(found.values()))[assigned(list(found), user_ids, seed, path)]


class Availability:
    """The times at which users' devices are on.

    Args:
        path: the CSV file.
        period: seconds after which its times repeat.
        user_ids: the ids of the U users.
        seed: assigns devices to users, if the file does not name users.

    Raises:
        ValueError: one line, when the file does not have this form.
    """

    def __init__(self, path: Path, period: float, user_ids: Sequence[str], seed: int) -> None:
        found: dict[str, list[tuple[float, float]]] = {}
        for line, client, (on, off) in _rows(path, AVAILABILITY):
            times = found.setdefault(client, [])
            if not (times[-1][1] if times else 0) <= on <= off <= period:
                raise ValueError(
                    f"{path}, line {line}: the times of a client must be in order, must not overlap, "
                    f"and must end by devices.availability_period_s = {period:g}"
                )
            times.append((on, off))
        self._device = assigned(list(found), user_ids, seed, path)
        self._ends = np.cumsum([len(times) for times in found.values()])
        self._times = np.array([pair for times in found.values() for pair in times])
        self._period = period

    def on(self, users: IntArray, seconds: float | FloatArray) -> BoolArray:
        """Whether these users ``[n]`` are on at one time, or each at its own time.

        Times may be off by their rounding, as those of `next_on` are.
        """
        rounding = np.asarray(4 * np.spacing(np.maximum(seconds, self._period)))
        return self._on(users, seconds, rounding) | self._on(users, seconds + rounding, rounding)

    def _on(self, users: IntArray, seconds: float | FloatArray, rounding: FloatArray) -> BoolArray:
        """By bisection."""
        devices, t = self._device[users], np.broadcast_to(np.mod(seconds, self._period), users.shape)
        low, high = np.where(devices > 0, self._ends[devices - 1], 0), self._ends[devices]
        first = low
        while (low < high).any():
            middle = (low + high) // 2
            begun = (low < high) & (self._times[np.minimum(middle, len(self._times) - 1), 0] <= t)
            low, high = np.where(begun, middle + 1, low), np.where(begun, high, middle)
        return np.asarray((low > first) & (t <= self._times[low - 1, 1] + rounding))

    def next_on(self, seconds: float) -> float:
        """The first time from ``seconds`` on at which any user's device is switched on."""
        known = np.zeros(len(self._ends), bool)
        known[self._device] = True
        begins = self._times[np.repeat(known, np.diff(self._ends, prepend=0)), 0]
        return float(seconds + np.mod(begins - seconds, self._period).min())
