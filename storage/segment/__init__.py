"""One segment on disk: manifest, arrays, packing, checksums, reading and writing."""
