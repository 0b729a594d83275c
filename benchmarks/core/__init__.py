"""What every benchmark shares: config, run directory, training, tracking."""
