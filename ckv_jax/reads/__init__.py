"""What comes from the store: packs, probes, and the threads that read them."""
