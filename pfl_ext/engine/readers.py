"""How many threads read images for each lane: more, where lanes wait for them. No result depends on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
SHARE = 0.1
"""A lane that waits for a larger share of its time in a round gets more readers."""


class Readers:
    """A number of threads for each lane, doubled after a round in which lanes have waited.

    Args:
        threads: at first.
        most: never more than these; where ``threads`` are as many, or while `held`, the number stays.
    """

    def __init__(self, threads: int, most: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.threads, self.most, self.held, self._clock = threads, most, False, clock
        self._lock, self._waited = threading.Lock(), 0.0

    def timed(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items, but for the first, which every lane has to wait for; waiting is counted."""
        yield from islice(items, 1)
        waited = 0.0
        try:
            while True:
                begin = self._clock()
                try:
                    item = next(items)
                except StopIteration:
                    return
                waited += self._clock() - begin
                yield item
        finally:
            with self._lock:
                self._waited += waited

    def after(self, seconds: float) -> bool:
        """Whether there are more readers after a round in which all lanes together took ``seconds``."""
        waited, self._waited = self._waited, 0.0
        if self.held or waited <= SHARE * seconds or self.threads >= self.most:
            return False
        self.threads = min(2 * self.threads, self.most)
        return True
