"""Where bytes lie: a local folder or an object store, and how they are read fast."""
