"""Where data comes from and how it lies on disk. Knows files and annotations, nothing of training."""
