"""Which segments there are: catalog, lookup, bounds and eviction."""
