"""Stored prefixes in memory: what of them is open, where their packs are, and reading them."""
