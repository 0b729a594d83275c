"""Layers for training on a CPU, compiled on the machine where they run."""
