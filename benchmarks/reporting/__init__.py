"""Reading runs; tables and plots."""
