"""Simulated attacks of users who want to harm a model, for tests of `pfl_ext.aggregation`."""
