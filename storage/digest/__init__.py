"""Compressed keys that stay in memory: writing and reading them."""
