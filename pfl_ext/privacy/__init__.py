"""Differential privacy: mechanisms, calibration, accounting, sampling."""
