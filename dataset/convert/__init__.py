"""Your own data, and other libraries' files, as the one HDF5 file that every benchmark reads."""
