"""CamVid: road scenes with masks of 11 classes, by drive (Brostow et al., 2009)."""
