"""PASCAL VOC 2007 and 2012: masks of 21 classes, or boxes of 20 (Everingham et al., 2010)."""
