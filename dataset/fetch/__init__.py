"""Reading files of a source: HTTP, archives, lists of images."""
