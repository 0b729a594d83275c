"""Experiments: each folder is one benchmark."""
