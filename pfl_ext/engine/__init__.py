"""Local training of a whole cohort, fast."""
