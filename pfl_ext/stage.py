"""What is done to a user's update on its way to the server's sum, before it is weighted."""

from __future__ import annotations

from pfl.postprocessor.base import Postprocessor

from pfl_ext.data.federated_dataset import IntArray


class Stage(Postprocessor):
    """One of pfl's postprocessors that knows which round it is for."""

    def begin(self, number: int, cohort: IntArray) -> None:
        """All workers call this before round ``number`` of these users."""

    def end(self) -> None:
        """All workers call this after the round."""
