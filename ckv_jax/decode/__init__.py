"""Decode: generates tokens after the first, each over the chunks that it selects of its prefix."""
