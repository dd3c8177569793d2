"""The HTTP server under load: what clients see, what it adds to the engine, and over bad disks."""
