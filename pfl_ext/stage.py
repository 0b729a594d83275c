"""Base of the processing of a user's update before it is weighted and added to the server's sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pfl.postprocessor.base import Postprocessor

from dataset.arrays import IntArray


class Stage(Postprocessor):
    """A pfl postprocessor that knows the current round."""

    def begin(self, number: int, cohort: IntArray) -> None:
        """Begin round ``number`` of these users; all workers call this."""

    def end(self) -> None:
        """End the round; all workers call this."""


def turn_of(user: int, turns: Mapping[int, Iterator[int]]) -> tuple[int, ...]:
    """The key of a user's draws besides its number, where it comes a second time or more in a cohort.

    ``turns``: of `FederatedImageDataset.later_turns`, from which the next turn is taken.
    """
    turn = next(turns[user]) if user in turns else 0
    return (turn,) if turn else ()
