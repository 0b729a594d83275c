"""Whether a training command keeps what this house promises: for algorithms and other code of one's own."""
