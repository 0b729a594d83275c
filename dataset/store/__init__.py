"""The HDF5 file: schema, writer, reader, index, validator and images."""
