"""The store's errors. Every one is a `CkvError`; readers of KV turn most of them into a miss."""

from __future__ import annotations


class CkvError(Exception):
    """Base of all errors that this package raises on purpose, besides `ValueError` for bad input."""
