"""Stored prefixes in memory: open prefixes, caches of packs, and reads."""
