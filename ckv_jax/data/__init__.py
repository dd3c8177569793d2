"""Texts and checkpoints that ship with the package."""
