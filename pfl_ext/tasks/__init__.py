"""Tasks: losses and scores of a network's outputs."""
