"""Base of the processing of a user's update before it is weighted and added to the server's sum."""

from __future__ import annotations

from pfl.postprocessor.base import Postprocessor

from dataset.arrays import IntArray


class Stage(Postprocessor):
    """A pfl postprocessor that knows the current round."""

    def begin(self, number: int, cohort: IntArray) -> None:
        """Begin round ``number`` of these users; all workers call this."""

    def end(self) -> None:
        """End the round; all workers call this."""
