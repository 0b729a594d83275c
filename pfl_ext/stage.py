"""Base of the processing of a user's update before it is weighted and added to the server's sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pfl.postprocessor.base import Postprocessor

from dataset.arrays import IntArray


class Stage(Postprocessor):
    """A pfl postprocessor that knows the current round, between `begin` and `end`."""

    _is_open = False

    def begin(self, number: int, cohort: IntArray) -> None:
        """Begin round ``number`` of these users; all workers call this.

        Raises:
            ValueError: one line, if the round before has not ended.
        """
        if self._is_open:
            raise ValueError(
                f"federated.algorithm begins a round of {self._what} before it ends the last one: call end() "
                "of each of RunContext.stages after the users trained"
            )
        self._is_open = True

    def end(self) -> None:
        """End the round; all workers call this."""
        self._is_open = False

    def check_open(self) -> None:
        """Refuse an update outside of a round, of which the number would be another.

        Raises:
            ValueError: one line that says what an algorithm must call.
        """
        if not self._is_open:
            raise ValueError(
                f"federated.algorithm does not begin its rounds of {self._what}: call begin(number, users) "
                "of each of RunContext.stages before the users train, and end() afterwards"
            )

    @property
    def _what(self) -> str:
        return type(self).__name__


def turn_of(user: int, turns: Mapping[int, Iterator[int]]) -> tuple[int, ...]:
    """The key of a user's draws besides its number, where it comes a second time or more in a cohort.

    ``turns``: of `FederatedImageDataset.later_turns`, from which the next turn is taken.
    """
    turn = next(turns[user]) if user in turns else 0
    return (turn,) if turn else ()
