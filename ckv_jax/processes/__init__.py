"""Several processes as one engine: one leads, the others follow. See `join` and docs/models.md."""
