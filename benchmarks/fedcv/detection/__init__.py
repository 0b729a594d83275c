"""Federated object detection."""
