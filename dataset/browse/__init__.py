"""A page of a file's users, with their images and annotations."""
