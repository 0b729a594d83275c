"""Hyperparameter sweeps."""
