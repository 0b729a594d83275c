"""FLAIR (Song, Granqvist, Talwar 2022): sources, the HDF5 file, and an embedded stand-in."""
