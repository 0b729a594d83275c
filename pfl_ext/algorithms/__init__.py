"""What server and clients exchange, one file for each algorithm."""
