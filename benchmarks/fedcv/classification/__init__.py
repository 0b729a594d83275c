"""Federated image classification as in FedCV."""
