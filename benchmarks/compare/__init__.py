"""Runs of any benchmark side by side."""
