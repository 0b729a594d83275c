"""The FLAIR benchmark: config, training, report."""
