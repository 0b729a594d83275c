"""FedVision's street scenes with boxes of 7 classes, by camera (Luo et al., arXiv 1910.11089)."""
