"""Where packs lie in memory: the device's pool, the host pool, and how packs get there."""
