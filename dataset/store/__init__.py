"""The HDF5 file: its schema, writer, reader, index, validator and images."""
