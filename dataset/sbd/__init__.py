"""The Semantic Boundaries Dataset: VOC's 21 classes as masks of 11,355 images (Hariharan et al., 2011)."""
