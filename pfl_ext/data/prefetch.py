"""Work done ahead of need on other threads, handed over in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetched(
    work: Callable[[Item], Result], items: Iterable[Item], *, ahead: int, threads: int = 1
) -> Iterator[Result]:
    """Yield ``work(item)`` in the order of ``items``, at most ``ahead`` results beyond the one in use.

    ``ahead=0`` runs everything in the calling thread. An exception of ``work`` is raised where its
    result would have been yielded; work that has not begun is then dropped.
    """
    if ahead < 1:
        yield from map(work, items)
        return
    source = iter(items)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    try:
        waiting: deque[Future[Result]] = deque(pool.submit(work, item) for item in islice(source, ahead))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(work, item) for item in islice(source, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
