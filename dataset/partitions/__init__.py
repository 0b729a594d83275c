"""Who owns which image."""
