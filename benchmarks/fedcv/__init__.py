"""Federated classification, segmentation and detection (He et al., FedCV, arXiv 2111.11066)."""
