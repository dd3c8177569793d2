"""How TensorStore says that something cannot be read."""

from __future__ import annotations

READ_ERRORS = (ValueError, OSError, RuntimeError, KeyError, IndexError, NotImplementedError)
"""What it raises for damaged, short, missing or unreadable data."""
