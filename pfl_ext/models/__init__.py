"""Networks: built, initialised, loaded."""
