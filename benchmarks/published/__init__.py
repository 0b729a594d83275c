"""Other people's published numbers, reproduced: a YAML for each row, and the results of the runs."""
