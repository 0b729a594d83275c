"""COCO 2017: boxes, or masks, of 80 categories (Lin et al., arXiv 1405.0312)."""
