"""Devices that are slow, drop out or are switched off, on a virtual clock."""
