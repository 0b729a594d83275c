"""What is done to a user's update on its way to the server's sum, before it is weighted."""

from __future__ import annotations

from pfl.postprocessor.base import Postprocessor

from pfl_ext.data.federated_dataset import IntArray


class Stage(Postprocessor):
    """One of pfl's postprocessors that knows which round it is for."""

    def begin(self, number: int, cohort: IntArray) -> None:
        """Begin round ``number`` of these users; all workers call this."""

    def end(self) -> None:
        """End the round; all workers call this."""
