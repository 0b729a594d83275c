"""Federated visual classification with real-world data distribution (Hsu, Qi, Brown, ECCV 2020)."""
