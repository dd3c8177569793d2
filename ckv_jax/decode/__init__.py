"""Decode: tokens after the first, each over what it selects of its prefix."""
