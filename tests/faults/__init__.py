"""Ways to hurt a store, and what must come of it: the rows of `python -m tests.faults`."""
