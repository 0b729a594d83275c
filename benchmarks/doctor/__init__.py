"""``make doctor``: what this machine has, how a run is computed on it, and whether that works."""
