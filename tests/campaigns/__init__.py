"""Campaigns: long searches for what breaks, each a command; the test suite runs a short form of each."""
