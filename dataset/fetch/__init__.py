"""From a source to files: HTTP, archives, lists of images."""
