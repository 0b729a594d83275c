"""Where data comes from and how it lies on disk. Knows files and labels, nothing of training."""
