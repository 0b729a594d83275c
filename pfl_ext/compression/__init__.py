"""Updates made small on their way to the server, with their bytes counted."""
