"""Federated semantic segmentation."""
