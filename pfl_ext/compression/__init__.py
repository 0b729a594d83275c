"""Compression of updates on their way to the server, and the sizes of messages."""
