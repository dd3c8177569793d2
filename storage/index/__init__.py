"""The index of segments: catalog, lookup, size limits and eviction."""
