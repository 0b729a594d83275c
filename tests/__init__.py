"""Tests, in the order of the three roots; this is imported before `tests.conftest`, and so before numpy."""

import importlib

importlib.import_module("benchmarks")  # sets what numpy's and torch's libraries read when they are loaded
