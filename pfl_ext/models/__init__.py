"""Networks: building, initialising and loading them."""
